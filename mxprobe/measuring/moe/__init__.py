"""Mixtures of experts: the GEMMs of experts held as one 3-D parameter, and the routing before them."""
