"""The table of `mutants.py`: a mistake that somebody could make in a line, and the tests that must notice it.

`old` occurs exactly once in `file` (tests/launch/repo/test_mutants.py checks it), and `new` is what a mistake would leave. `tests` are
the arguments of pytest that should kill the mutant, cheap ones: they run for it alone. Add a row for a mistake that you nearly made.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAN = "tests/geometry/test_plan.py"
LAYOUT = "tests/geometry/test_layout.py"
MASK = "tests/geometry/test_mask.py"
ROWS = "tests/geometry/test_rows.py"
IN_C = "tests/geometry/test_plans_in_c.py"
SCHEDULES = "tests/schedule/test_schedules.py"
PROGRAM = "tests/schedule/test_program.py"
EXACT = "tests/test_attention.py -k dout_on_one_rank_only"
STATISTICS = "tests/test_attention.py -k lse"
ROUNDING = "tests/test_attention.py -k 'errors_are_those_of_dense and bfloat16'"
CROSS = "tests/distributed/test_cross.py"
STAGED = "tests/transport/test_staged.py"
STEPS = "tests/kernels/test_score_steps.py"
PLAYED = "tests/kernels/test_played_forward.py tests/kernels/test_played_backward.py"
MODIFIED = "tests/kernels/test_hopper_modified.py -k 'where_they_can or cannot_be_met'"
BLOCKED = "tests/device/test_blocked.py"
SCORES = "tests/test_scores.py -x"
RECORDINGS = "tests/kernels/test_recordings.py"
STREAMS = "tests/device/test_streams.py"
ULYSSES = "tests/runtime/test_ulysses.py"
AGREEMENT = "tests/distributed/test_agreement.py"
ERRORS = "tests/test_errors.py"
ORDER = "tests/distributed/test_order.py -k 'odd_one or over_gloo'"
RECURRENCES = "tests/recurrent/test_linear_attention.py"
INTERPRETER = "tests/kernels/interpreter_cases.py"
CAUSAL = f"{INTERPRETER} -k 'test_causal_at_odd_lengths or test_masks'"


@dataclass(frozen=True)
class Mutation:
    """Text `old` of a file becomes `new`; `why` says what goes wrong then."""

    file: str
    old: str
    new: str
    why: str
    tests: str


MUTATIONS = (
    # geometry: who holds what, what is live
    Mutation(
        "ringattn/geometry/span.py",
        "lo = _ceil(k_start - low, stride) + shift",
        "lo = _ceil(k_start - low, stride) + shift + 1",
        "a tile skips its lower edge: a causal query no longer sees itself",
        PLAN,
    ),
    Mutation(
        "ringattn/geometry/span.py",
        "hi = (high + k_start if stride == 1 else (high + k_start) // stride) + shift",
        "hi = (high + k_start if stride == 1 else (high + k_start) // stride) + shift - 1",
        "a tile skips its upper edge: the farthest key of a window",
        PLAN,
    ),
    Mutation(
        "ringattn/geometry/span.py",
        "meets &= (queries.start[:, None] - regions[:, Q_START]) % regions[:, STRIDE] == 0",
        "meets &= True",
        "dilated masks meet queries of other residues",
        PLAN,
    ),
    Mutation(
        "ringattn/geometry/layout.py",
        "np.array([ranks, 2 * world_size - 1 - ranks]).T",
        "np.array([ranks, world_size + ranks]).T",
        "zigzag's second half in the wrong order of ranks",
        LAYOUT,
    ),
    Mutation(
        "ringattn/geometry/layout.py",
        "last = start + stride * (length - 1)\n        steps",
        "last = start + stride * length\n        steps",
        "positions off by one",
        LAYOUT,
    ),
    Mutation(
        "ringattn/geometry/layout.py",
        "    if total != seq_len:\n",
        "    if total > seq_len:\n",
        "a removed check: positions that nobody holds",
        LAYOUT + " " + ERRORS + " -k 'position or layout'",
    ),
    Mutation(
        "ringattn/geometry/mask.py",
        "lo = max(lo, 0)",
        "lo = max(lo, 1)",
        "a token of a packed document does not see itself",
        MASK,
    ),
    Mutation(
        "ringattn/geometry/mask.py",
        "(seq_len if left is None else min(left, seq_len))",
        "(seq_len if left is None else min(left, seq_len) - 1)",
        "a window is one key too narrow",
        MASK,
    ),
    Mutation(
        "ringattn/geometry/mask.py",
        "parts.append(value.digest if isinstance(value, Mask) else repr(value))",
        "parts.append(type(value).__name__)",
        "a loosened digest: masks of one class are equal",
        MASK,
    ),
    Mutation(
        "ringattn/digest.py",
        "digest_size=16).hexdigest())",
        "digest_size=16).hexdigest()[:8])",
        "a loosened digest: 32 bits, of which a collision is found in a second",
        "tests/runtime/test_op.py -k digest",
    ),
    Mutation(
        "ringattn/geometry/plan.py",
        "out[:, _BAND] -= shift[:, None]",
        "out[:, _BAND] += shift[:, None]",
        "the band of a tile moves the wrong way with the rows of its buffer",
        EXACT,
    ),
    Mutation(
        "ringattn/geometry/plan.py",
        "tables[0][:, 1] += keys.q_offset",
        "tables[0][:, 1] += 0 * keys.q_offset",
        "queries of a later chunk see the keys of the first one",
        CROSS,
    ),
    Mutation(
        "ringattn/geometry/mask.py",
        "shift = stop - k_stop",
        "shift = start - k_start",
        "the queries of a document's last chunk are taken for its first tokens",
        CROSS,
    ),
    Mutation(
        "ringattn/geometry/rows.py",
        "reach = np.maximum.accumulate(end)",
        "reach = end",
        "rows that lie within others are joined wrongly",
        ROWS,
    ),
    Mutation(
        "ringattn/geometry/rows.py",
        "x[index] = x.index_select(0, index).add_(values)",
        "x[index] = values",
        "gradients of scattered rows are overwritten instead of added",
        ROWS,
    ),
    # schedules and programs: what moves, and when
    Mutation(
        "ringattn/schedule/schedules.py",
        "path = [(owner + hop) % n for hop in range(1, n)]",
        "path = [(owner + hop) % n for hop in range(1, max(2, n - 1))]",
        "a dropped hop: the last rank of a ring never gets the K/V",
        SCHEDULES,
    ),
    Mutation(
        "ringattn/schedule/schedules.py",
        "yield Transfer(owner, rank, owner, plan.needs(rank, owner), 0, wave, wave - 1)",
        "yield Transfer(owner, rank, owner, plan.needs(owner, rank), 0, wave, wave - 1)",
        "waves bring the rows that the owner needs, not this rank",
        SCHEDULES,
    ),
    Mutation(
        "ringattn/schedule/schedules.py",
        "ranks = [(node * size + (owner + hop) % size, turn * size + hop) for hop in range(size)]",
        "ranks = [(node * size + (owner + hop) % size, turn * size + hop) for hop in range(max(1, size - 1))]",
        "a dropped hop of a double ring",
        SCHEDULES + " " + PROGRAM,
    ),
    Mutation(
        "ringattn/schedule/schedules.py",
        "            found.append(Transfer(rank, t.dst, owner, t.rows, buffer, t.into, t.into))\n",
        "            pass\n",
        "gradients that came along the ring are not passed on",
        PROGRAM,
    ),
    Mutation(
        "ringattn/schedule/schedules.py",
        "return queries if traffic.moved(queries, plan) < traffic.moved(keys, plan) else keys",
        "return keys if traffic.moved(queries, plan) < traffic.moved(keys, plan) else queries",
        "what is more bytes moves: queries or keys",
        CROSS,
    ),
    Mutation(
        "ringattn/schedule/program.py",
        "        found += adds[t]\n",
        "",
        "gradients that came from other ranks are not added",
        PROGRAM,
    ),
    Mutation(
        "ringattn/schedule/program.py",
        "        found.append(Fence(t, Stream.EXCHANGES))\n",
        "",
        "a missing stream wait: gradients leave before they are computed",
        STREAMS,
    ),
    Mutation(
        "ringattn/schedule/program.py",
        "        found.append(Fence(t, Stream.LAUNCHES))\n",
        "",
        "a missing stream wait: a launch begins before its K/V have come",
        PROGRAM,
    ),
    Mutation(
        "ringattn/schedule/program.py",
        "(old.rows, old.holds) == (x.buffer.rows, x.buffer.holds)",
        "old.rows == x.buffer.rows",
        "gradients in 16 bits between hops, as a buffer of K/V becomes one of sums",
        PROGRAM,
    ),
    Mutation(
        "ringattn/schedule/memory.py",
        "most = max(most, held + copied + launch)",
        "most = max(most, held + launch)",
        "predicted memory leaves out the rows that are gathered",
        f"{PROGRAM} -k bytes",
    ),
    # running a pass, and the agreement before it
    Mutation(
        "ringattn/runtime/query_passes.py",
        "add(parts, more)",
        "_write(parts, more)",
        "a partial that comes back takes the place of the rank's own",
        CROSS,
    ),
    Mutation(
        "ringattn/runtime/passes.py",
        "                assert handle is not None\n                handle.wait()\n            case Close():",
        "                pass\n            case Close():",
        "stale K/V: the forward pass does not wait for an exchange",
        EXACT,
    ),
    Mutation(
        "ringattn/runtime/passes.py",
        "                    with streams.exchanges:\n                        handle.wait()\n",
        "",
        "stale K/V and gradients: the backward pass does not wait for an exchange",
        EXACT,
    ),
    Mutation(
        "kernels/ringattn_kernels/submission.py",
        "waits = call[0] not in (_LAUNCH, _MARK) or late",
        "waits = late",
        "a launch that waits for other ranks is queued before the ranks agree",
        "tests/kernels/test_submission.py",
    ),
    Mutation(
        "ringattn/device/streams.py",
        "                self._come_after(self._exchanges.stream, self._caller)\n                self._followed = True\n",
        "                self._followed = True\n",
        "a launch does not wait for the queries that are prepared beside the first exchange",
        STREAMS,
    ),
    Mutation(
        "ringattn/runtime/passes.py",
        "dk, dv = local.rounded_sums(own, last, kv_dtype)",
        "dv, dk = local.rounded_sums(own, last, kv_dtype)",
        "dk and dv are swapped",
        EXACT,
    ),
    Mutation(
        "ringattn/runtime/passes.py",
        "dtype = q.dtype if kv_dtype == q.dtype and program.alone else torch.promote_types(q.dtype, torch.float32)",
        "dtype = q.dtype",
        "gradients in bf16 between hops",
        ROUNDING,
    ),
    Mutation(
        "ringattn/runtime/passes.py",
        "final=final and x.last, continued=continued)",
        "final=final, continued=continued)",
        "the output in bf16 between hops",
        ROUNDING,
    ),
    Mutation(
        "ringattn/runtime/passes.py",
        "        local.zero((k[x.begin : x.end], v[x.begin : x.end]))",
        "        pass",
        "sums are not set to zero before they are added to",
        "tests/test_attention.py -k begin_at_zero",
    ),
    Mutation(
        "ringattn/device/local.py",
        "delta = delta - drow_sum * row_sum",
        "delta = delta + drow_sum * row_sum",
        "the gradient of the statistics has the wrong sign",
        STATISTICS,
    ),
    Mutation(
        "ringattn/runtime/agree.py",
        "record = _RECORD.pack(False, 0, facts.hash, number, *UNKNOWN[:2])",
        "record = _RECORD.pack(False, 0, facts.hash, 0, *UNKNOWN[:2])",
        "a call not counted: backward passes of other calls are paired",
        ORDER,
    ),
    Mutation(
        "ringattn/runtime/agree.py",
        "same_label = len(set(labels)) == 1 or",
        "same_label = True or",
        "calls from other lines are paired",
        ORDER,
    ),
    Mutation(
        "ringattn/runtime/op.py",
        "    if made_by != call.identity(score):",
        "    if False:",
        "a removed check: a layer is computed again with another layout",
        "tests/integrations/test_replace.py -k another_mask_between",
    ),
    Mutation(
        "ringattn/runtime/agree.py",
        ".encode(), digest_size=16).digest()",
        ".encode()[:1], digest_size=16).digest()",
        "a loosened digest: ranks do not compare the facts",
        AGREEMENT,
    ),
    Mutation(
        "ringattn/runtime/calls.py",
        '            "requires_grad": needs_grad,\n',
        "",
        "a removed fact: ranks of which some have no backward pass do not notice",
        AGREEMENT,
    ),
    Mutation(
        "ringattn/runtime/calls.py",
        '            "softmax_scale": softmax_scale,\n',
        "",
        "a removed fact: ranks with different scales do not notice",
        AGREEMENT,
    ),
    Mutation(
        "ringattn/runtime/calls.py",
        "    if held != tokens:\n",
        "    if held < tokens:\n",
        "a removed check: a shard shorter than the layout says",
        ERRORS + " -k length",
    ),
    Mutation(
        "ringattn/runtime/rank_attention.py",
        "dx.unflatten(2, (-1, copies)).sum(3).to(dtype)",
        "dx.unflatten(2, (-1, copies)).select(3, 0).to(dtype)",
        "gradients of copied K/V heads are lost but for one",
        ULYSSES,
    ),
    Mutation(
        "ringattn/runtime/ulysses.py",
        "self.rank = ring.rank * heads.size + heads.rank",
        "self.rank = heads.rank * ring.size + ring.rank",
        "ranks of a grid are numbered the other way",
        ULYSSES,
    ),
    Mutation(
        "ringattn/collective.py",
        "            total += received[rank]\n",
        "            pass\n",
        "the gradient of a shard leaves out what other ranks computed",
        "tests/test_attention.py -k unshard_is_the_inverse",
    ),
    Mutation(
        "ringattn/partial.py",
        "weight_b = b.row_sum * (b.row_max.detach() - pivot).exp()",
        "weight_b = b.row_sum * (a.row_max.detach() - pivot).exp()",
        "merging takes the other part's maximum",
        "tests/test_partial.py",
    ),
    Mutation(
        "ringattn/check.py",
        "    if h % hk:\n",
        "    if h < hk:\n",
        "a removed check: query heads that K/V heads do not divide",
        ERRORS + " -k heads",
    ),
    Mutation(
        "ringattn/check.py",
        "    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):\n",
        "    if not isinstance(value, (int, np.integer)):\n",
        "a removed check: True is taken for 1",
        ERRORS + " tests/test_odd_arguments.py -k 'bool or sliding'",
    ),
    # transports: who sends to whom, and what waits for what
    Mutation(
        "ringattn/transport/process_group.py",
        "dist.P2POp(dist.isend, _lent(x), self._global_ranks[rank], group)",
        "dist.P2POp(dist.isend, _lent(x), rank, group)",
        "a wrong group rank: messages of a group go to ranks of the job",
        "tests/distributed/test_gloo.py -k group_ranks_are_not_global",
    ),
    Mutation(
        "ringattn/transport/process_group.py",
        "nodes = [rank // int(",
        "nodes = [rank % int(",
        "ranks of a node are found by the wrong digit",
        "tests/transport/test_transports.py",
    ),
    Mutation(
        "ringattn/transport/staged.py",
        "    queue.wait([(channel.ready, channel.count)])\n",
        "",
        "stale K/V: a chunk is pulled before it is there",
        STAGED,
    ),
    Mutation(
        "ringattn/transport/channels.py",
        "        if must_be_read <= self.awaited:\n",
        "        if must_be_read <= self.awaited + 1:\n",
        "a chunk is overwritten before it has been read",
        STAGED,
    ),
    Mutation(
        "ringattn/transport/staged.py",
        "                self._current.after(mark)\n",
        "                pass\n",
        "a missing stream wait: computation goes on before the messages are there",
        STAGED,
    ),
    Mutation(
        "ringattn/transport/channels.py",
        "while oldest < count and occupied[oldest][0] < end and occupied[oldest][1] > first:",
        "while False:",
        "a channel forgets which chunks lie in a place",
        STAGED,
    ),
    Mutation(
        "ringattn/transport/exchange_plan.py",
        "<= rooms[1] // 2",
        "<= 2 * rooms[1]",
        "messages at rest fill more than the near channel holds",
        f"{STAGED} -k twice_as_much",
    ),
    Mutation(
        "ringattn/transport/shared_records.py",
        "if found > number:",
        "if found > number + 10**9:",
        "a removed check: a record that was overwritten is taken for the awaited one",
        "tests/distributed/test_host_channel.py -k overwritten",
    ),
    # the device: plain torch, streams
    Mutation(
        "ringattn/device/blocked.py",
        "_EXACT = torch.float64",
        "_EXACT = torch.float32",
        "the two passes round scores differently",
        "tests/test_attention.py -k saturated",
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "            dscores.masked_fill_(~block.live, 0.0)",
        "            pass",
        "NaN in dout reaches keys that do not see it",
        "tests/device/test_blocked.py -k no_farther",
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "first, last = max(k_begin, q0 - hi), min(k_end, q1 - lo)",
        "first, last = max(k_begin, q0 - hi), min(k_end, q1 - lo - 1)",
        "a skipped mask edge: the last key that a block sees",
        BLOCKED,
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "dv[:, block.k] += ",
        "dv[:, block.k] = ",
        "a block's dv replaces that of the blocks before",
        BLOCKED,
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "part *= (before * scale)",
        "part *= (1.0 * scale)",
        "the output of earlier keys is not rescaled to the new maximum",
        BLOCKED,
    ),
    Mutation(
        "ringattn/device/streams.py",
        "            self._come_after(self._exchanges.stream, self._sending)\n",
        "            pass\n",
        "a missing stream wait: exchanges do not wait for the launch whose gradients they send",
        STREAMS,
    ),
    Mutation(
        "ringattn/device/streams.py",
        "        self._start.before(on.stream)\n",
        "",
        "a missing stream wait: a launch does not wait for the K/V that it reads",
        STREAMS,
    ),
    Mutation(
        "ringattn/device/streams.py",
        "            for other in (self._exchanges.stream, *self._used):\n",
        "            for other in (self._exchanges.stream,):\n",
        "a missing stream wait: dQ is rounded before launches have added to it",
        STREAMS,
    ),
    Mutation(
        "ringattn/schedule/program.py",
        "self._numbers, self._holds = held.numbers, holds",
        "self._numbers, self._holds, self._held = held.numbers, holds, held",
        "plans and the tables of their launches lie in a cycle: they stay until Python looks for cycles",
        PROGRAM,
    ),
    # kernels, through Triton's interpreter, or what they are launched with
    Mutation(
        "kernels/ringattn_kernels/continued.py",
        "np.add.at(marks, -(-later[:, 1] // _WHOLE), -1)",
        "np.add.at(marks, later[:, 1] // _WHOLE, -1)",
        "a block that later launches read holds rows that have left: it reads no state of them",
        "tests/kernels/test_continued.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/attention.py",
        "            launch(*done, part=continued.part.others)\n",
        "            pass\n",
        "rows that no later launch touches are never written",
        "tests/kernels/test_continued.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/bands.py",
        "last = tl.minimum(rows - lo, end - 1)",
        "last = tl.minimum(rows - lo - 1, end - 1)",
        "a skipped mask edge in the plain kernels",
        CAUSAL,
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "scores -= _per_head(modifiers.slopes, hk) * block.distance.abs()",
        "scores -= _per_head(modifiers.slopes, hk) * -block.distance",
        "ALiBi rewards keys of the future",
        SCORES,
    ),
    Mutation(
        "ringattn/geometry/plan.py",
        "out[:, _K_PLACE] -= stride * shift",
        "out[:, _K_PLACE] += stride * shift",
        "positions of keys are off after they have travelled",
        SCORES,
    ),
    Mutation(
        "ringattn/geometry/plan.py",
        "same = [2 - axis, 3 - axis, *range(_TILE, len(boxes))]",
        "same = [2 - axis, 3 - axis]",
        "tiles of other positions are joined",
        f"{IN_C} -k joined",
    ),
    Mutation(
        "kernels/ringattn_kernels/plans.c",
        "for (int64_t column = TILE_COLUMNS; column < joined->columns; column++) {",
        "for (int64_t column = TILE_COLUMNS + 1; column < joined->columns; column++) {",
        "tiles of other positions are joined in C",
        f"{IN_C} -k joined",
    ),
    Mutation(
        "kernels/ringattn_kernels/plans.c",
        "a->load != b->load ? a->load < b->load : a->rank < b->rank",
        "a->load < b->load",
        "chunks of equal work go to other ranks in C than in NumPy, so ranks with and without a compiler disagree",
        f"{IN_C} -k dealt",
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "total = before + (sinks[:, None] - pivot).exp()",
        "total = before + 2 * (sinks[:, None] - pivot).exp()",
        "sinks are counted twice",
        SCORES,
    ),
    Mutation(
        "ringattn/device/philox.py",
        "np.arange(batch)[:, None] * dropout.heads",
        "np.arange(batch)[:, None] * heads",
        "which pairs are dropped depends on how many heads a rank has",
        SCORES,
    ),
    Mutation(
        "ringattn/device/blocked.py",
        "dweights = dweights if share is None else dweights.mul_(share)",
        "dweights = dweights",
        "the backward pass forgets which pairs were dropped",
        SCORES,
    ),
    Mutation(
        "kernels/ringattn_kernels/plain_forward.py",
        """scale, MASKED, SCALE_FIRST)
    # [BLOCK_K, BLOCK_DV]
    v = load_block(v_desc, v_ptr, batch, kv_head, start, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)""",
        """scale, MASKED, SCALE_FIRST)
    # [BLOCK_K, BLOCK_DV]
    v = load_block(v_desc, v_ptr, batch, kv_head, start, stride_vs, end, BLOCK_K, V_DIM, BLOCK_DV, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)""",
        "the output of earlier keys is not rescaled to the new maximum",
        CAUSAL,
    ),
    Mutation(
        "kernels/ringattn_kernels/plain_forward.py",
        "acc = tl.load(state_ptr + out_offsets, mask=out_mask, other=0.0) * row_sum[:, None]",
        "acc = tl.load(state_ptr + out_offsets, mask=out_mask, other=0.0)",
        "a launch forgets how much the launches before it weigh",
        f"{INTERPRETER} -k random_tiles",
    ),
    Mutation(
        "kernels/ringattn_kernels/gradients.py",
        "store_gradient(dk_ptrs, dk * softmax_scale, mask, ADD)",
        "store_gradient(dk_ptrs, dk, mask, ADD)",
        "dk is not scaled",
        CAUSAL,
    ),
    Mutation(
        "kernels/ringattn_kernels/gradients.py",
        "        gradient += tl.load(pointers, mask=mask, other=0.0)\n",
        "        gradient += 0.0\n",
        "a launch's gradients replace those of the launches before",
        f"{INTERPRETER} -k random_tiles",
    ),
    Mutation(
        "kernels/ringattn_kernels/statistics.py",
        "total = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)",
        "total = tl.sum(out.to(tl.float32) * out.to(tl.float32), 1)",
        "delta is of the output alone",
        CAUSAL,
    ),
    Mutation(
        "kernels/ringattn_kernels/splits.py",
        "weight = split_sum * tl.math.exp2(split_max - pivot[None, :])",
        "weight = split_sum",
        "splits are merged without regard to their maxima",
        f"{INTERPRETER} -k splits_merge",
    ),
    # training
    Mutation(
        "ringattn/training/loss.py",
        "share = 1 / total.clamp(min=1)",
        "share = 1 / total",
        "a missing clamp: 0 / 0 where no token counts",
        "tests/training/test_loss.py -k without_a_valid_token",
    ),
    Mutation(
        "ringattn/training/loss.py",
        "factor = (reduction.divisor * share)",
        "factor = (1 * share)",
        "an unscaled loss: gradients are divided once too often",
        "tests/training/test_loss.py -k factor",
    ),
    Mutation(
        "ringattn/training/causal_lm.py",
        "F.pad(tokens[..., 1:].to(torch.int64), (0, 1), value=IGNORE)",
        "F.pad(tokens[..., :-1].to(torch.int64), (1, 0), value=IGNORE)",
        "labels off by one: each token predicts the one before",
        "tests/training/test_causal_lm.py -k labels_are_the_next",
    ),
    Mutation(
        "ringattn/training/data.py",
        "        shifted[:, ends[ends >= 0]] = IGNORE\n",
        "",
        "labels cross the bounds of packed documents",
        "tests/training/test_data.py",
    ),
    Mutation(
        "ringattn/training/data.py",
        "torch.searchsorted(starts, positions, right=True)",
        "torch.searchsorted(starts, positions, right=False)",
        "positions of a document's first token belong to the document before",
        "tests/training/test_data.py",
    ),
    Mutation(
        "ringattn/training/tiled.py",
        "return torch.cat(parts, dim=-2)",
        "return torch.cat(parts[::-1], dim=-2)",
        "tiles come back in the wrong order",
        "tests/training/test_tiled.py -k 'test_tiles_give_the_same'",
    ),
    Mutation(
        "ringattn/training/offload.py",
        "if x is not None and x._version != self._version:",
        "if False:",
        "a removed check: a parked tensor was changed in place",
        "tests/training/test_offload.py -k changes_in_place",
    ),
    Mutation(
        "ringattn/training/offload.py",
        "        self.fetch()\n        self._memory.wait(self._device)\n",
        "        self.fetch()\n",
        "a missing stream wait: the backward pass reads before the copy has ended",
        "tests/training/test_offload.py -k copies_are_waited_for",
    ),
    # doors
    Mutation(
        "ringattn/integrations/sdpa.py",
        "mask = around.masks[is_causal]",
        "mask = around.masks[True]",
        "attention over the whole sequence becomes causal",
        "tests/integrations/test_replace.py",
    ),
    Mutation(
        "ringattn/integrations/sdpa.py",
        "if dropout_p:\n",
        "if dropout_p > 1:\n",
        "a removed check: dropout is left out silently",
        "tests/integrations/test_replace.py -k cannot_be_honoured",
    ),
    Mutation(
        "ringattn/integrations/ring_flash_attn_arguments.py",
        "hands = np.stack([rank, 2 * ranks - 1 - rank], axis=1)",
        "hands = np.stack([rank, ranks + rank], axis=1)",
        "the second chunk of each document goes to another rank",
        "tests/integrations/test_ring_flash_attn.py -k equals_dense",
    ),
    Mutation(
        "ringattn/integrations/ring_flash_attn/__init__.py",
        "tuple(ranks.size * bound for bound in bounds)",
        "bounds",
        "documents end where a rank's rows do",
        "tests/integrations/test_ring_flash_attn.py -k equals_dense",
    ),
    Mutation(
        "ringattn/integrations/huggingface_attachment.py",
        "sliding_window(window - 1, None)",
        "sliding_window(window, None)",
        "a model's window is one key too wide",
        "tests/integrations/test_huggingface.py -k window_counts_the_token",
    ),
    Mutation(
        "ringattn/integrations/huggingface_positions.py",
        "found.add(padding + 1)",
        "found.add(padding)",
        "RoBERTa's first position is that of padding",
        "tests/integrations/test_huggingface_models.py -k RobertaForMaskedLM",
    ),
    Mutation(
        "ringattn/integrations/huggingface_padding.py",
        "both[:, 0].max(axis=0)",
        "both[0, 0]",
        "the first rank alone says where rows end",
        "tests/integrations/test_huggingface_models.py -k test_padding_on_the_right",
    ),
    Mutation(
        "ringattn/integrations/huggingface_heads.py",
        "[:, None], logits, others)",
        "[:, None], logits, logits)",
        "a head for sequences answers from the last token of the shard",
        "tests/integrations/test_huggingface_models.py -k head_for_sequences",
    ),
    Mutation(
        "ringattn/integrations/huggingface_scores.py",
        "* module.inv_norm_factor\n",
        "* 1.0\n",
        "Falcon's slopes without the scale",
        "tests/integrations/test_huggingface_scores.py -k equals_the_dense_one",
    ),
    Mutation(
        "ringattn/integrations/huggingface_scores.py",
        "table = _table(module, hidden_states) if position_bias is None else position_bias\n",
        "table = _table(module, hidden_states)\n",
        "T5's later layers without the first one's bias",
        "tests/integrations/test_huggingface_scores.py -k equals_the_dense_one",
    ),
    Mutation(
        "ringattn/integrations/huggingface_mixers.py",
        "return causal() if live.documents is None else documents",
        "return causal() if live.mask is None else documents",
        "states pass from one packed document to the next",
        "tests/integrations/test_huggingface_mixers.py -k packed_documents_of",
    ),
    Mutation(
        "ringattn/integrations/huggingface_mixers.py",
        "missing = [name for name in required if name not in mixing.used]",
        "missing = [name for name in required if name in ()]",
        "a layer that takes another way runs within the shard",
        "tests/integrations/test_huggingface_mixers.py -k refused_by_name",
    ),
    Mutation(
        "ringattn/integrations/huggingface_recurrences.py",
        "A.to(step.dtype) * step, scale=1.0, dtype",
        "A.to(step.dtype) * step, dtype",
        "Mamba-2 with attention's scale",
        "tests/integrations/test_huggingface_mixers.py -k packed_documents_of",
    ),
    Mutation(
        "ringattn/integrations/huggingface_call.py",
        "self.batch.without_last(after)",
        "self.batch",
        "the first tokens of a question are taken for its last",
        "tests/integrations/test_generation.py -k questions",
    ),
    Mutation(
        "ringattn/integrations/generation.py",
        "if length + count < sequence.length:\n",
        "if length + count < 0:\n",
        "padding stays in the cache",
        "tests/integrations/test_generation.py -k tokens_are_those",
    ),
    Mutation(
        "ringattn/integrations/deepspeed.py",
        "self.ring = mesh[ring_axis].get_group()",
        "self.ring = mesh[data_axis].get_group()",
        "a wrong group: the ring of DeepSpeed's mesh",
        "tests/integrations/test_deepspeed.py -k 'equal_those_of_one_process'",
    ),
    Mutation(
        "ringattn/verification.py",
        "return self.sharded <= self.limit",
        "return not self.sharded > self.limit",
        "a removed check: NaN passes",
        "tests/test_verification.py -k nan_never",
    ),
    # masks and stores on Hopper
    Mutation(
        "kernels/ringattn_kernels/hopper/forward_softmax.py",
        "setp.neu.or.f32 p, {before[1]}, {now[1]}, p;",
        "",
        "weights of half of the rows stay those of the pivot before",
        f"{STEPS} -k renewed",
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/forward_kernel.py",
        "q_kept = kept_queries(blocks.q.index(q_place), KEPT, SCORES)\n        s_token",
        "s_token",
        "the columns that stay in registers are those of the first work's queries",
        PLAYED,
    ),
    Mutation(
        "ringattn/warmup.py",
        "(1, 1024, 64, 64), ",
        "",
        "a first call with short sequences compiles a kernel that `warm` left out",
        "tests/test_warmup.py -k later_calls",
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/forward_softmax.py",
        "add.s32 n, live{row}, 7;",
        "add.s32 n, live{row}, 8;",
        "a row sees the key behind its last one",
        STEPS,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/forward.py",
        "return fits and is_aligned(out)",
        "return fits",
        "the copy engine is given an address that it refuses",
        "tests/kernels/test_hopper_forward.py -k copy_engine_stores",
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused.py",
        "x.dtype == q.dtype and ",
        "",
        "the copy engine rounds partial sums of dk and dv to 16 bits",
        "tests/kernels/test_hopper_backward.py -k copy_engine_stores",
    ),
    # partitions of the Hopper kernels
    Mutation(
        "kernels/ringattn_kernels/hopper/forward_kernel.py",
        "(taken + Q_STAGES - 2) % Q_STAGES",
        "(taken + Q_STAGES - 1) % Q_STAGES",
        "queries come to a place from which out is still stored",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/forward_kernel.py",
        "gl.maximum(steps - DRAWN_AHEAD, 0)",
        "steps - DRAWN_AHEAD",
        "a program with a short work never draws the next one",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/forward_kernel.py",
        "block = pass_by(barriers, block, work.after, WARPGROUP, NEXT, TURNS, STAGES, 1)",
        "block += work.after",
        "a warpgroup goes by blocks of keys, and nobody learns that their room is empty",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/gradient_rows.py",
        "    tma.store_wait(0)\n",
        "",
        "dk comes to a place from which dv is still stored",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused_kernel.py",
        "last_row = this_row",
        "last_row = head_row + start",
        "dq of a step is added to the rows of the next one",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused_kernel.py",
        """                named_barrier("sync", last_buffer * 2 + 1 - HALF, n)
            staging.ds.index(buffer * 2 + HALF).store(shared_ds)
""",
        """                pass
            staging.ds.index(buffer * 2 + HALF).store(shared_ds)
            if NAMED and not WIDE:
                named_barrier("sync", last_buffer * 2 + 1 - HALF, n)
""",
        "a warpgroup stores dS over one that the other still multiplies",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused_kernel.py",
        """                named_barrier("sync", last_buffer * 2 + 1 - HALF, n)
            staging""",
        """                named_barrier("sync", buffer * 2 + 1 - HALF, n)
            staging""",
        "warpgroups wait for each other's dS of this step, and neither stores its own",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused_kernel.py",
        "wait_for_products(DQ_PRODUCTS, dv_next + dk_next)",
        "wait_for_products(DQ_PRODUCTS + 1, dv_next + dk_next)",
        "queries come to the place of those that dk still reads",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused_kernel.py",
        "                elif not NAMED or n > 0:\n",
        "                else:\n",
        "the compiler moves the sums' address about among the products of the scores",
        "tests/kernels/test_hopper_backward.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/ordered_loads.py",
        "            wait_for_turn(counter_ptr, item, seen)\n",
        "",
        "dq is added in the order in which it comes",
        PLAYED,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/owned_dq.py",
        "wait_until_stored(0)",
        "tma.store_wait(0)",
        "a total is read that the copy engine has not added up yet",
        PLAYED,
    ),
    # heads that programs have for themselves
    Mutation(
        "kernels/ringattn_kernels/hopper/touches.py",
        "(last | first[previous])",
        "last",
        "a missing wait: dq is added to sums that are not stored yet",
        "tests/kernels/test_touches.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/touches.py",
        "np.cumsum(~last) - ~last",
        "np.arange(len(last))",
        "steps that give the copy engine nothing count as if they did",
        "tests/kernels/test_touches.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/fused.py",
        "config_for(d, owned=True).step).untouched:",
        "config_for(d, owned=True).step).steps < 0:",
        "rows that no key meets keep what was in memory",
        "tests/kernels/test_hopper_backward.py -k for_themselves",
    ),
    # modified scores on Hopper
    Mutation(
        "kernels/ringattn_kernels/hopper/kept_pairs.py",
        "2 * m + word // 2",
        "2 * m + word % 2",
        "bits of dropout are those of the wrong pairs",
        STEPS,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/kept_pairs.py",
        "selp.b32 pick, 0x3276, 0x5410, p;",
        "selp.b32 pick, 0x5410, 0x3276, p;",
        "a thread takes its neighbour's keys",
        STEPS,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/score_steps.py",
        "abs.f32 d, d;",
        "",
        "ALiBi rewards keys of the future",
        STEPS,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/score_steps.py",
        "@p bra FAR;",
        "",
        "a softcap beyond the polynomial",
        STEPS,
    ),
    Mutation(
        "kernels/ringattn_kernels/dispatch.py",
        "if kernels != Kernels.HOPPER)",
        ")",
        "the backward in two kernels forgets what is done to scores",
        MODIFIED,
    ),
    Mutation(
        "kernels/ringattn_kernels/table.py",
        "self.stride == 1 and not",
        "not",
        "dropout of strided rows draws for other pairs",
        "tests/kernels/test_table.py -k aligned",
    ),
    Mutation(
        "ringattn/device/local.py",
        ".sum((0, 2)).neg_()",
        ".sum((0, 2))",
        "the gradient of sinks has the wrong sign",
        SCORES,
    ),
    Mutation(
        "kernels/ringattn_kernels/hopper/score_sums.py",
        "setp.ge.and.s32 far, n, ${last}, !near;",
        "setp.ge.s32 far, n, ${last};",
        "a bias that all pairs share gets the gradient of some twice",
        STEPS,
    ),
    # recorded passes
    Mutation(
        "kernels/ringattn_kernels/recordings.py",
        "        recorder.cannot_note(name)\n",
        "",
        "a replay leaves out an operation of torch",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/launches.py",
        '    recorder.cannot_note("a launch that Triton prepares")\n',
        "",
        "a replay leaves out a launch, and a rehearsal makes one on tensors without memory",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/recorder.py",
        "            recorder.unwatched = _Unwatched()\n",
        "            pass\n",
        "a pass that makes a table is never replayed",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/repeats.py",
        "        self._new = 0\n",
        "        pass\n",
        "a model's next batch is recorded in its second call alone",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/recordings.py",
        "            self.allocated.clear()\n",
        "",
        "a pass that is too large to be recorded keeps the memory that it lets go of",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/stand_ins.py",
        "-(-max(1, last + 1) * dtype.itemsize // _APART) * _APART",
        "_APART",
        "tensors of a rehearsal lie in each other",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/recordings.py",
        "return Number(self._inside, self._memory[begin] + address - begin)",
        "return Number(self._inside, address - begin)",
        "parts of the memory inside a pass fall together",
        RECORDINGS,
    ),
    Mutation(
        "kernels/ringattn_kernels/submission.py",
        "return Number(self.index, self.offset + more)",
        "return Number(self.index, more)",
        "a recorded copy begins elsewhere in its tensor",
        "tests/kernels/test_submission.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/waits.py",
        "not any(i != j and others.get(point.stream, -1) >= point.calls for",
        "not any(i != j and others.get(point.stream, -1) >= point.calls - 1 for",
        "a wait is left out that no other one implies",
        "tests/kernels/test_waits.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/submission.py",
        "if place == first + MEMORY_OPERATION.size * earlier and together",
        "if together",
        "memory operations are joined that do not lie side by side",
        "tests/kernels/test_submission.py",
    ),
    Mutation(
        "ringattn/runtime/ready.py",
        "if mask is not self._mask and not _equal(mask, self._mask):",
        "if False:",
        "a call with another mask replays the latest one",
        "tests/runtime/test_ready.py",
    ),
    Mutation(
        "ringattn/runtime/ready.py",
        "if schedule is not self._schedule and not _equal(schedule, self._schedule):",
        "if schedule is not self._schedule:",
        "whoever makes the same schedule anew in each call never finds the latest call",
        "tests/runtime/test_ready.py",
    ),
    Mutation(
        "ringattn/runtime/ready.py",
        "if self._caller is None or self._caller[0] is not code or self._caller[1] != at:",
        "if self._caller is None or self._caller[0] is not code:",
        "a replayed call has the line of another one, so that mixed up calls are not found",
        "tests/runtime/test_ready.py",
    ),
    Mutation(
        "kernels/ringattn_kernels/recordings.py",
        "x.dtype, x.device, x.requires_grad, not",
        "x.dtype, x.device, not",
        "what a call without gradients did is replayed for one that needs some",
        "tests/kernels/test_recordings.py -k told_apart",
    ),
    Mutation(
        "ringattn/predict/simulation.py",
        "state, in_launches = (2 if alone else 5) * stat, 0",
        "state, in_launches = 3 * stat, 0",
        "the planner forgets what a pass over several launches keeps of each row",
        "tests/predict/test_planner.py -k peak",
    ),
    Mutation(
        "ringattn/transport/listed_channels.py",
        "channel.awaited = must_be_read",
        "pass",
        "a recorded exchange overwrites what its reader has not read",
        "tests/transport/test_staged.py -k recorded",
    ),
    Mutation(
        "ringattn/transport/staged.py",
        "recorder.note(self.recorded.wait)",
        "pass",
        "a replayed pass computes before its messages have come",
        "tests/transport/test_staged.py -k recorded",
    ),
    Mutation(
        "kernels/ringattn_kernels/recordings.py",
        "where = now, inputs[0].device",
        "where = now[1:]",
        "what one GPU did is replayed for another",
        RECORDINGS,
    ),
    # layers with a state
    Mutation(
        "ringattn/recurrent/state_passing.py",
        "zip(indices, target)",
        "zip(indices, target.flip(0))",
        "a segment begins with a state that comes from the wrong span",
        RECURRENCES,
    ),
    Mutation(
        "ringattn/recurrent/transitions.py",
        "return total.exp()[..., None] * state if self.numbers else state",
        "return state",
        "a missing decay: a state crosses a segment as if it were not there",
        RECURRENCES,
    ),
    Mutation(
        "ringattn/recurrent/halos.py",
        "if held.first:",
        "if source < 0:",
        "the halo of a convolution goes on into the document before",
        "tests/recurrent/test_convolution.py",
    ),
    Mutation(
        "ringattn/recurrent/kernels.py",
        "decay.clamp(min=_ERASES)",
        "decay",
        "fla subtracts -inf from -inf where a token forgets all",
        "tests/recurrent/test_kernels.py -k erases",
    ),
    Mutation(
        "ringattn/recurrent/kernels.py",
        "tuple(lengths) * b",
        "tuple(length for length in lengths for _ in range(b))",
        "sequences of a batch are cut elsewhere than they are joined",
        "tests/recurrent/test_kernels.py -k made_of_it",
    ),
    Mutation(
        "ringattn/runtime/kept.py",
        "if self._x._version != self._version:",
        "if False:",
        "a recomputation takes an output that was changed in place after it was kept",
        "tests/runtime/test_kept.py -k changed_in_place",
    ),
    Mutation(
        "ringattn/runtime/kept.py",
        "storing, self._storing = self._storing, []",
        "storing = self._storing",
        "what checkpointed code keeps outlives the backward pass, in a node of the graph",
        "tests/runtime/test_kept.py -k nothing_is_kept",
    ),
    Mutation(
        "ringattn/predict/recurrence.py",
        "4 * halos.T",
        "4 * halos",
        "gradients of halos are predicted to go the way of the rows",
        "tests/predict/test_recurrence.py -k messages",
    ),
    # predictions
    Mutation(
        "ringattn/predict/planner.py",
        "fitting = [p for p in found if p.peak <= memory]",
        "fitting = [*found]",
        "schedules that do not fit the memory are recommended",
        "tests/predict/test_planner.py -k 'memory or recommend or fastest'",
    ),
)
