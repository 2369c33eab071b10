"""The real GRPO run behind `mxprobe demo`: `job` is the user's script, `runner` what a user would do around it."""
