"""What runs inside the attached process. Shipped: standard library and torch only, Python 3.9 syntax.

The training thread only takes copies (`hooks`, `snapshot`), at steps where `session` has armed it; everything
else (`measure` and what it calls, `transport`) happens in threads of ours, which end at detach.
"""
