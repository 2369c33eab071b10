"""The operands of a GEMM: what is copied of a call, and its rounding error."""
