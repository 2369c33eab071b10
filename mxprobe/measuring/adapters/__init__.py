"""How each family of modules shows the operands of its GEMMs: one file per family, listed in `families`."""
