"""Values of columns `form` and `phase` of table `weight_codes`. No torch: readers of a trace need them too."""

TABLE = "weight_codes"
TRAIN, ROLLOUT = "train", "rollout"
AS_HELD = "held"
TRANSPOSED = "transposed"
NOT_COMPARABLE = "not comparable"
BF16 = "bf16"
ROUNDED: tuple[str, ...] = ("mxfp4+rceil", "mxfp4+floor", "mxfp4+even")
"""How an engine may have rounded the trainer's weights."""
OF_BF16 = " of bf16"
"""After one of these: of weights in float32 that were sent in bfloat16."""
