"""The tables of a trace and their columns.

Standard library only and Python 3.9 syntax: the agent ships this file. Arrow types are made on demand by
`mxprobe.trace`, from the type names used here.
"""

from mxprobe_kernels.columns import CODE_BINS, COUNTS, DELTA_BINS, ENERGY_SUMS

# Arrow type names: int64, int32, float64, bool, string, dict (dictionary-encoded string),
# list<int64>, list<int64:N> (fixed size).
Columns = tuple[tuple[str, str], ...]

_WHEN: Columns = (("step", "int64"), ("micro_step", "int32"), ("time_ns", "int64"))
_OPERAND: Columns = (
    *_WHEN,
    ("module", "dict"),
    ("role", "dict"),
    ("phase", "dict"),
    ("format", "dict"),
    ("rule", "dict"),
    ("sampled_frac", "float64"),  # rows measured / rows there were
    ("n_clusters", "int64"),  # rows (or 32-token tiles) measured: the sampling units
    # Which part of the operand this rank holds, and after " | " what its partner adds: "tokens=r0 in=1/2 | out=0/2".
    # Equal texts are copies: see mxprobe.measuring.adapters.placement. Empty, or null in older traces: the whole.
    ("placement", "dict"),
)

OUTPUT_SUMS: tuple[str, ...] = (
    # Squared Frobenius norms of the consuming GEMM's output error, one operand perturbed, on the sampled rows.
    "out_ref2",  # the exact product
    "out_e2",
    "out_scale2",
    "out_dz2",
    "out_grid2",
    "out_scale_dz",  # inner products
    "out_scale_grid",
    "out_dz_grid",
    "out_zeroed2",  # error made on realised-zeroed elements alone
    "out_saturated2",
)

EXPERT_SUMS: tuple[str, ...] = (
    # What is kept of a single expert's operand; the rest is summed over the experts of the layer, in `tensors`.
    *("n", "n_deadzone", "n_zeroed", "n_saturated", "n_nonfinite"),
    *("sum_x2", "sum_e2", "sum_scale2", "sum_dz2", "sum_grid2", "sum_scale_grid", "sum_scale_dz"),
    *OUTPUT_SUMS,
)
SPREAD_QUANTILES: tuple[int, ...] = (0, 10, 25, 50, 75, 90, 100)
"""Percent."""

_EXPERTS: Columns = (
    ("n_steps", "int64"),  # 1; more where old steps were added up: divide by it what follows, and quantiles
    ("n_experts", "int64"),  # of the module
    ("n_called", "int64"),  # that were sent a token
)

SPAN: Columns = (("n_steps", "int64"), ("last_step", "int64"))
"""Columns of the tables in `THINNED`, beside those in `TABLES`. A row as it was measured has 1 and its own `step`; one
that adds up several steps of its operand says how many, and the last of them: they lie in `step` to `last_step`."""

THINNED: tuple[str, ...] = (
    *("tensors", "outputs", "whatif", "blocks", "gradients", "sensitivity"),
    *("updates", "overhead"),
)
"""Tables whose old steps the writer may add up: those with a row per operand or step, and sums in it."""

TABLES: dict[str, Columns] = {
    "tensors": (
        *_OPERAND,
        *((name, "int64") for name in COUNTS),
        *((name, "float64") for name in ENERGY_SUMS),
        ("amax", "float64"),
        ("n_edge_blocks", "int64"),  # that one GPU would form differently: a shard ends within a block
        ("delta_hist", f"list<int64:{DELTA_BINS}>"),  # log2(s/s*) in [0, 1); outside is clipped to the end bins
        ("code_hist", f"list<int64:{CODE_BINS}>"),  # sign * 8 + E2M1 code
        *((name, "float64") for name in OUTPUT_SUMS),
    ),
    # Of experts held as one parameter, the worst of each operand (all on request): see mxprobe.measuring.moe.spread.
    "experts": (
        *_OPERAND,
        *_EXPERTS,
        ("expert", "int64"),  # index into the parameter
        ("rows", "int64"),  # tokens it was sent
        ("rank_output_error", "int32"),  # 0 for the worst of those measured
        ("rank_zeroed", "int32"),
        *((name, "int64" if name.startswith("n") else "float64") for name in EXPERT_SUMS),
    ),
    # How the experts of a layer differ. Quantiles over the experts measured of a ratio, which cannot be added.
    "expert_spread": (
        *_OPERAND,
        *_EXPERTS,
        ("n_measured", "int64"),
        ("n_one_token", "int64"),  # of those measured
        ("measure", "dict"),  # output_error, error, zeroed, rows (tokens of an expert; under x_fwd)
        *((f"q{percent}", "float64") for percent in SPREAD_QUANTILES),
    ),
    # What quantizing a router's operands would do to its choice, and what its own arithmetic did: see
    # mxprobe.measuring.moe.routing. Sums over the sampled tokens; centred: the mean over experts taken off.
    "routing": (
        *_WHEN,
        ("module", "dict"),
        ("phase", "dict"),
        ("format", "dict"),
        ("rule", "dict"),
        ("sampled_frac", "float64"),
        ("n_tokens", "int64"),
        ("top_k", "int64"),
        ("by_logits", "bool"),  # the experts chosen are those of the k largest logits: flips can be told
        ("sum_margin", "float64"),  # of the k-th largest logit over the next
        ("sum_margin2", "float64"),
        ("sum_logit2", "float64"),  # centred
        ("sum_error2", "float64"),  # predicted error of the logits, centred
        ("sum_ran_error2", "float64"),  # of the logits as the run computed them, centred
        ("sum_chance", "float64"),  # expected flips, by margin and size of the predicted error alone
        ("n_predicted", "int64"),  # tokens that quantized operands would send to other experts; null: not by logits
        ("n_slots_predicted", "int64"),  # experts exchanged
        ("n_observed", "int64"),  # tokens sent to others than the k largest of exact logits
        ("n_slots_observed", "int64"),
    ),
    # The same tokens in generation and in training: see mxprobe.agent.probes.routing_probe.
    "routing_flips": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("module", "dict"),
        ("top_k", "int64"),
        ("n_tokens", "int64"),
        ("n_flipped", "int64"),  # tokens that were sent to other experts
        ("n_slots", "int64"),  # experts exchanged
    ),
    # One row per module and phase: does the layer do what its inputs and weights say it should?
    "outputs": (
        *_WHEN,
        ("module", "dict"),
        ("phase", "dict"),
        ("recipe_x", "dict"),  # inferred from the values: "none" or "<format>+<rule or correction>"
        ("recipe_w", "dict"),
        ("exact", "bool"),  # the recipe reproduces y: residual2 <= 1e-5 ref2
        ("sampled_frac", "float64"),
        ("n_rows", "int64"),
        ("ref2", "float64"),  # ||x W^T||^2 with the trainer's current W, high precision
        ("realised2", "float64"),  # ||y - b - x W^T||^2
        ("predicted2", "float64"),  # ||Q(x) Q(W)^T - x W^T||^2 under the inferred recipe
        ("residual2", "float64"),  # ||y - b - Q(x) Q(W)^T||^2
        ("weight_lag", "int64"),  # steps behind the trainer's weights, 0 for current ones; null where not known
    ),
    "whatif": (
        *_OPERAND,
        ("correction", "dict"),
        ("n", "int64"),
        ("n_zeroed", "int64"),
        ("sum_e2", "float64"),
        ("sum_e2_on_d", "float64"),  # on the D of the uncorrected quantizer
        ("out_ref2", "float64"),
        ("out_e2", "float64"),
        ("out_zeroed2", "float64"),  # output error left on the elements the uncorrected quantizer zeroed
    ),
    # How peaked the blocks of an operand are, in how few channels and elements its error lies, what the axis of a
    # weight's blocks changes: see
    # mxprobe.measuring.operands.block_statistics and mxprobe.attribution.neighbours.
    "blocks": (
        *_OPERAND,
        ("n_blocks", "int64"),  # that are not all zero
        ("sum_crest", "float64"),  # over these blocks; crest: maximum / root mean square
        ("sum_crest2", "float64"),
        ("sum_underflow", "float64"),  # share of a block's elements with Q = 0, x != 0
        ("sum_underflow2", "float64"),
        ("sum_crest_underflow", "float64"),
        ("sum_e2", "float64"),
        ("sum_e2_top1", "float64"),  # in the 1 % of channels (along the contraction axis) with most of it
        ("sum_e2_top5", "float64"),
        ("sum_e2_top10", "float64"),
        ("sum_e2_sparse1", "float64"),  # in the 1 % of each row's elements with most of it
        ("sum_e2_sparse5", "float64"),
        ("sum_e2_sparse10", "float64"),
        # w_dgrad: ||W quantized along rows - along columns||^2 where both were measured, and ||W||^2 there; else null
        ("sum_transposed2", "float64"),
        ("sum_tile2", "float64"),
    ),
    # Error of a weight gradient (or of dX) against the exact product of the same captured operands, both quantized;
    # one row per component, which is put into both operands alone. Relative error, cosine, norm ratio: derived.
    "gradients": (
        *_WHEN,
        ("module", "dict"),
        ("gemm", "dict"),  # wgrad: dW = G^T X, dgrad: dX = G W; on sampled rows and features
        ("component", "dict"),  # total, scale, deadzone, grid
        ("format", "dict"),
        ("rule", "dict"),
        ("sampled_frac", "float64"),
        ("n_clusters", "int64"),
        ("ref2", "float64"),  # ||exact||^2
        ("err2", "float64"),  # ||with errors - exact||^2
        ("ref_err", "float64"),  # <exact, with errors - exact>
        ("half_a2", "float64"),  # wgrad: squared norms of the two halves of the rows' gradient, and <a, b>
        ("half_b2", "float64"),
        ("half_ab", "float64"),
    ),
    # Delta2 by replay of one microbatch: see mxprobe.measuring.replay.sensitivity. Divide by n_tokens last.
    "sensitivity": (
        *_WHEN,
        ("module", "dict"),
        ("role", "dict"),  # x_fwd, w_fwd
        ("component", "dict"),  # total, scale, deadzone, grid; a correction: what it would leave
        ("format", "dict"),
        ("rule", "dict"),
        ("probe", "int64"),  # index of the random signs
        ("n_tokens", "float64"),  # counted positions of the samples measured
        ("n_samples", "int64"),
        ("sum_delta2", "float64"),  # / n_tokens ~ E[(change of log p)^2]; half of it ~ KL
        ("sum_log_prob_shift", "float64"),  # first-order change of log p of the run's tokens; NaN: tokens not known
        ("sum_entropy_shift", "float64"),
    ),
    # Counterfactual forwards of one microbatch against high precision: see mxprobe.measuring.replay.arms.
    "replays": (
        *_WHEN,
        ("arm", "dict"),
        ("format", "dict"),
        ("rule", "dict"),
        ("estimator", "dict"),  # of sum_kl: exact (from logits) or k3
        ("n_modules", "int64"),  # Linears that round as the arm says
        ("n_tokens", "float64"),
        ("sum_kl", "float64"),  # KL(high || arm)
        ("sum_log_prob_shift", "float64"),
        ("sum_log_prob_shift2", "float64"),
        ("sum_entropy_shift", "float64"),
        ("loss_shift", "float64"),  # of the loss that the model itself returns; NaN if it returns none
        # of the run's loss, to first order in the policy: <its gradient at the policy, policy of arm - of high>; NaN
        # where that gradient is not known
        ("policy_loss_shift", "float64"),
    ),
    # The weight gradient of each arm of a replay, all six operands of every Linear rounded as the arm says, run back
    # from the gradient of the run's loss at the policy. Relative error, cosine, norm ratio: derived.
    "replay_gradients": (
        *_WHEN,
        ("arm", "dict"),
        ("module", "dict"),
        ("format", "dict"),
        ("rule", "dict"),
        ("sampled_frac", "float64"),  # of the weight's output features
        ("ref2", "float64"),  # ||dW of high||^2
        ("err2", "float64"),  # ||dW of the arm - dW of high||^2
        ("ref_err", "float64"),  # <dW of high, dW of the arm - dW of high>
        ("sum_grad_step", "float64"),  # of arm q_weights: <dW of the arm, w - Q(w)>, and the step's norm; else null
        ("sum_step2", "float64"),
    ),
    # Hashes of some rows of each weight, by the trainer and by an engine that serves: see
    # mxprobe.measuring.engines.fingerprints. Joined by time and module.
    "weight_codes": (
        ("step", "int64"),  # of this process: optimizer steps, or passes served
        ("time_ns", "int64"),
        ("module", "dict"),  # the trainer's name
        ("phase", "dict"),  # train, rollout
        ("form", "dict"),  # train: bf16, mxfp4+<rule>[ of bf16]; rollout: held, transposed, not comparable
        # of an engine: how it stores the weight, or why it cannot be compared; of a trainer's fused experts: what is
        # taken for granted of how they are stored, "" where that is known
        ("layout", "dict"),
        ("shape", "list<int64>"),  # of the whole weight; [experts of this rank, O, K] of a trainer's fused experts
        ("features", "list<int64>"),  # rows that are hashed; of fused experts row o of expert e as e O + o
        ("hashes", "list<int64>"),
    ),
    # What the error of one operand does to the weight gradients of the whole model, wherever it travels: see
    # mxprobe.measuring.replay.gradient_probes.
    "gradient_probes": (
        *_WHEN,
        ("module", "dict"),  # or a group of them, `*.q_proj`
        ("role", "dict"),
        ("component", "dict"),  # total, scale, deadzone, grid
        ("format", "dict"),
        ("rule", "dict"),
        ("method", "dict"),  # double_backward: first order; intervention: run again with the error put in
        ("n_probes", "int64"),  # random directions behind err2; 0 for an intervention
        ("ref2", "float64"),  # ||all weight gradients||^2
        ("err2", "float64"),  # ||their change||^2
    ),
    # Do updates reach the quantized policy? Between two versions of the watched weights of a module, of neighbouring
    # steps where there are: see mxprobe.measuring.versions.weight_updates.
    "updates": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("module", "dict"),
        ("from_step", "int64"),
        ("format", "dict"),
        ("rule", "dict"),
        ("n", "int64"),  # elements compared
        ("n_flipped", "int64"),  # whose quantized value changed
        ("n_code_flipped", "int64"),  # whose E2M1 code changed, from +0 to -0 not
        ("n_returned", "int64"),  # whose quantized value changed back to that of the version before
        ("n_near", "int64"),  # within a tenth of a grid step of a rounding boundary, before the update
        ("n_returnable", "int64"),  # elements with a version before: n or 0
        ("sum_w2", "float64"),
        ("sum_dw2", "float64"),
        ("sum_dq2", "float64"),
        ("sum_dw_dq", "float64"),
        ("sum_abs_dw", "float64"),
        ("sum_abs_dq", "float64"),
    ),
    # The residual stream behind each block, the same tokens in two forwards: see mxprobe.measuring.replay.floor.
    "layers": (
        *_WHEN,
        ("layer", "dict"),
        ("depth", "int32"),  # 0 for the first block
        # generation_training: prompt tokens, at the prefill of a generation and in the training forward. The floors,
        # of a replay: the batch put together otherwise, with every Linear exact (floor) and as it runs (floor_own).
        # injected, propagated, error: of a replay's arm q, `layer` a Linear and its output in the stream's place: see
        # mxprobe.measuring.replay.representation
        ("comparison", "dict"),
        ("n_tokens", "int64"),
        ("ref2", "float64"),  # sum over tokens of |s|^2, s a random projection of the stream
        ("diff2", "float64"),
        ("median_frac", "float64"),  # median over tokens of |difference|^2 / |s|^2
        ("eps", "float64"),  # of the stream's dtype
    ),
    # Log-probabilities of sampled tokens by rollout and trainer: see mxprobe.measuring.tokens.
    # d = log p_rollout - log p_train, w = exp(-d), dp = p_rollout - p_train; sums over tokens.
    "rollouts": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("source", "dict"),  # generation: measured in this process; else the function that was given the batch
        # all; entropy_q1 (lowest) to entropy_q4: quarters by the rollout's entropy; advantage_positive, _negative,
        # _zero; position_0, _16, _64, ... and length_...: bins of the token's place and the response's length by
        # their first value; lag_0 to lag_4 (and more): updates the drawing policy is behind; routing_same,
        # routing_flipped: whether every router chose the same experts where the token was predicted
        ("stratum", "dict"),
        ("temperature", "float64"),  # at which both sides are taken; NaN where it is the framework's
        ("dtype", "dict"),  # the coarsest that the log-probabilities of either side have passed through
        ("n_sequences", "int64"),  # found in a training batch of the step ...
        ("n_unmatched", "int64"),  # ... and looked for in vain
        ("n_tokens", "int64"),
        ("sum_d", "float64"),  # / n_tokens = k1, an estimate of KL(rollout || train)
        ("sum_abs_d", "float64"),
        ("sum_d2", "float64"),
        ("max_abs_d", "float64"),
        ("sum_k3", "float64"),  # w - 1 + d
        ("sum_w", "float64"),  # effective sample size: sum_w^2 / (n_tokens sum_w2)
        ("sum_w2", "float64"),  # / n_tokens - 1 = chi squared of train from rollout
        ("sum_dp", "float64"),
        ("sum_abs_dp", "float64"),
        ("n_outside_clip", "int64"),  # |w - 1| > 0.2
        ("n_false_clip", "int64"),  # of those, the ones whose gradient PPO takes away; null: advantages not known
        ("n_nonfinite", "int64"),  # tokens left out because a side has no finite log-probability for them
        ("sum_entropy_rollout", "float64"),  # null where a batch does not hold it
        ("sum_entropy_train", "float64"),
        # u = log p_rollout + entropy of the rollout at that token: 0 on average where tokens are plain draws; null
        # where a batch holds no entropies. Effective temperature: 1 - sum_u_d / sum_u2
        ("sum_u", "float64"),
        ("sum_u2", "float64"),
        ("sum_u_d", "float64"),
    ),
    "signals": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("source", "dict"),  # the sink that was wrapped
        ("framework", "dict"),
        ("raw_key", "dict"),
        ("metric", "dict"),  # canonical name, "" when unmapped
        ("estimator", "dict"),
        ("value", "float64"),
    ),
    # What happened: facts in columns, and words for people that nothing reads. See mxprobe.events.
    "events": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("kind", "dict"),
        ("subject", "dict"),  # the module or thing that it is about, "" for the run
        ("state", "dict"),  # a slug
        ("data", "string"),  # JSON: the other facts by name
        ("detail", "string"),  # the words
    ),
    # The flight recorder's past, and what followed: see mxprobe.measuring.flight_memory.
    "flight": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("kind", "dict"),  # output: of a leaf module, the largest call; gradient: of a parameter
        ("name", "dict"),
        ("position", "int64"),  # of the module in the step's forward pass, from 0; -1 where it was not seen
        ("n", "int64"),  # elements
        ("norm", "float64"),  # L2; not finite where an element is not
    ),
    # The last row per module wins: written at attach, again at detach with the counts.
    "modules": (
        ("time_ns", "int64"),
        ("module", "dict"),
        ("class_name", "dict"),
        ("dtype", "dict"),
        ("shape", "list<int64>"),
        ("n_parameters", "int64"),
        ("status", "dict"),  # probed, not_selected, not_called, not_linear
        ("reason", "string"),
        ("train_rows", "int64"),  # rows through its GEMM per training step, seen by the hook
        ("rollout_rows", "int64"),
        ("gemm_flops", "float64"),  # forward FLOPs per training step: 2 * rows * parameters; estimated if not seen
    ),
    "overhead": (
        ("step", "int64"),
        ("time_ns", "int64"),
        ("probed", "bool"),
        ("step_ns", "int64"),  # since the previous optimizer step, probe included
        ("probe_ns", "int64"),  # spent in our hooks in this step
        ("measure_ns", "int64"),  # spent measuring in a thread of ours since the previous row
        ("n_dropped", "int64"),  # rows given up since attach (queue full)
        ("n_errors", "int64"),  # exceptions swallowed since attach
        ("sent_bytes", "int64"),
    ),
}
