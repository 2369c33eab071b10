"""`mxprobe audit`: what each module computes with on each side, and the known ways of getting it wrong."""

from .audit import Audit as Audit
from .audit import audit as audit
from .modules import ModuleAudit as ModuleAudit
from .modules import SideAudit as SideAudit
from .pitfalls import PITFALLS as PITFALLS
from .pitfalls import Finding as Finding
