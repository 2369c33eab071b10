"""`mxprobe audit`: what each module computes with on each side, and the known ways of getting it wrong."""

from .audit import Audit as Audit
from .audit import audit as audit
from .module_audit import ModuleAudit as ModuleAudit
from .module_audit import SideAudit as SideAudit
from .pitfalls import PITFALLS as PITFALLS
from .pitfalls import Finding as Finding
