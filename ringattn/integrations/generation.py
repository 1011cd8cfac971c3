"""`RingCache`: transformers' key/value cache over a `PagedCache`, by which an attached model generates around its ring.

    attach(model)
    cache = RingCache(model, tokens=100_000)
    answer = model.generate(prompt, past_key_values=cache, max_new_tokens=100)  # the whole prompt, on every rank

A call of the model with such a cache takes whole tokens on every rank and returns whole logits. The first call, the prefill, runs on
shards: each rank computes its tokens' keys and values, which go to the ranks that keep their pages. So does a later call of many tokens,
in which each layer attends to the pages of all ranks by `prefill`. Calls of few tokens run on all ranks alike, and attend by `decode`.

Rows of a batch that end together (left padding) are turned to begin together: what follows a row's last token is then hidden by
causality, and its keys are forgotten after the call. Layers with states: `generation_states.py`.

Shapes: b rows of a call, n columns of its tokens.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import check
from ..geometry.layout import Layout, zigzag
from ..runtime.agree import refusing
from ..serving.cache import PagedCache
from ..serving.decoding import MOST_QUERIES
from ..serving.pages import CachedSequence, OutOfPages
from ..transport import Alone
from .generation_agreement import agree_on_tokens, generators
from .generation_models import CachedHeads, check_cache_name, check_decodes, check_goes_back, prompt_layout
from .generation_states import LayerState, chosen_states
from .huggingface_attachment import NAME, Attachment, not_compiled
from .huggingface_call import CachedCall
from .huggingface_inputs import check_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# tokens that continue a cache and are computed by all ranks alike: `prefill` reads the cache about as often as `decode` in four parts
_MOST_ALIKE = 4 * MOST_QUERIES


class RingCache(Cache):
    """The keys and values of an attached model, in pages on all ranks: `model.generate(ids, past_key_values=RingCache(model, ...))`.

    Args:
        model: an attached model; its group is the cache's.
        tokens: of all sequences together that must have room: prompts with their padding, and answers. What sequences share counts once.
        sequences: how many there are at a time: rows of a batch times beams, and forks; each may leave its last pages in part empty.
        page_size: tokens of a page, a power of two of at least 16.
        layout: of a prompt, a function of its length and the number of ranks: `ringattn.zigzag` (the default), `striped`, `contiguous`.
        dtype, device: of the pages, by default the model's. Under autocast give its dtype.

    Calls of the model with it take the same whole `input_ids` (b, n) on every rank, and return whole logits. The ranks compare the tokens
    first. A cache may be given again, with all tokens so far and new ones, as any cache of transformers: the new ones alone are computed.
    Every rank makes the same calls of the cache's methods, in the same order.

    Raises ValueError for a model that is not attached or cannot decode, and for bad input.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokens: int,
        sequences: int = 1,
        page_size: int = 64,
        layout: Callable[[int, int], Layout] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        attachment: Attachment | None = getattr(model, NAME, None)
        if attachment is None:
            raise ValueError(f"{type(model).__name__} is not attached: call ringattn.integrations.huggingface.attach(model) first")
        with refusing(attachment.ranks):
            check_decodes(model, attachment)
            self.kept = CachedHeads.of(model)
            tokens = check.integer("tokens", tokens, least=1)
            sequences = check.integer("sequences", sequences, least=1)
            page_size = check.integer("page_size", page_size, least=16, most=1 << 16)
            if layout is not None and not callable(layout):
                raise ValueError(
                    f"layout is {check.shown(layout)}, but must be a function of a length and a number of ranks, such as ringattn.zigzag"
                )
        ranks = attachment.ranks.size
        # each sequence but a single one may have a part of a page on each rank, and the copy of a page
        pages = math.ceil(math.ceil(tokens / page_size) / ranks) + (0 if sequences == 1 else 3 * sequences)
        self.paged = PagedCache(
            pages=pages,
            layers=len(self.kept.layers) or 1,
            kv_heads=self.kept.kv_heads,
            head_dim=self.kept.head_dim,
            v_head_dim=self.kept.v_head_dim,
            page_size=page_size,
            dtype=model.dtype if dtype is None else dtype,
            device=model.device if device is None else device,
            group=attachment.group,
        )
        super().__init__(layers=[_Layer(self) for _ in range(max(self.kept.layers, default=0) + 1)])
        self.states: dict[int, LayerState] = {}  # by number of the layer among those that have states
        self.alone = Alone()  # what all ranks compute alike, they compute as one rank
        self._layout = zigzag if layout is None else layout
        self._sequences: list[CachedSequence] = []
        self._seen = 0  # columns, with padding
        self._visible: torch.Tensor | None = None  # (b, seen), which columns hold tokens; None: all
        self._call: CachedCall | None = None  # under way
        self._fitting: Attachment | None = None  # of a model that the cache fits
        self._drawn = b""  # the state of the generators after the latest call

    @property
    def sequences(self) -> tuple[CachedSequence, ...]:
        """The rows' sequences of `paged`, with their lengths in tokens without padding."""
        return tuple(self._sequences)

    def fork(self) -> RingCache:
        """Another cache with the same tokens, in the same pages: what either adds, the other does not see. So does `copy.deepcopy`.

        `reset` of each gives back the pages that it alone holds.
        """
        self._settle()
        found = object.__new__(RingCache)
        vars(found).update(vars(self))
        found.layers = [_Layer(found) for _ in self.layers]
        found._sequences = [self.paged.fork(sequence) for sequence in self._sequences]
        return found

    def __deepcopy__(self, memo: dict) -> RingCache:
        return self.fork()

    def reset(self) -> None:
        """Forget all tokens, and give up their pages."""
        self._settle()
        for sequence in self._sequences:
            self.paged.free(sequence)
        self._sequences, self._seen, self._visible, self.states = [], 0, None, {}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns of each row: -n forgets n of them. Raises ValueError for more than there are, and for numbers above 0;
        of a model with states, for any but none and all."""
        self._settle()
        with refusing(self.paged.pool.context.ranks):
            tokens_to_remove = check.integer("tokens_to_remove", tokens_to_remove, least=-self._seen, most=0)
            if tokens_to_remove not in (0, -self._seen):
                check_goes_back(self.kept, f"crop by {-tokens_to_remove} of {self._seen} tokens")
        kept = self._seen + tokens_to_remove
        lost = self._visible[:, kept:].sum(1).tolist() if self._visible is not None else [-tokens_to_remove] * len(self._sequences)
        for sequence, count in zip(self._sequences, lost, strict=True):
            self.paged.truncate(sequence, sequence.length - count)
        self.states = self.states if kept else {}
        self._seen, self._visible = kept, self._visible[:, :kept] if kept and self._visible is not None else None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes row `beam_idx[i]`: sequences fork where several rows come from one, and their pages stay where they are."""
        self._settle()
        rows = beam_idx.tolist()
        with refusing(self.paged.pool.context.ranks):
            if any(not 0 <= row < len(self._sequences) for row in rows):
                raise ValueError(f"rows are {rows}, but the cache has the rows 0 to {len(self._sequences) - 1}")
        self._choose(rows)
        if self._visible is not None:
            self._visible = self._visible[rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, for calls with as many answers to each prompt; they share the prompt's pages."""
        repeats = check.integer("repeats", repeats, least=1)
        self.reorder_cache(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows alone."""
        self.reorder_cache(indices)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included, as transformers counts them."""
        return self._seen

    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """How many columns a mask would have, and 0."""
        new = len(query_length) if isinstance(query_length, torch.Tensor) else query_length
        return self._seen + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The most tokens of a sequence."""
        return self.paged.max_tokens

    def activate_past_recording(self) -> None:
        """Nothing to do: `crop` can always go back. Raises ValueError for a model with states, which cannot."""
        with refusing(self.paged.pool.context.ranks):
            check_goes_back(self.kept, "speculative decoding")

    @property
    def batch_size(self) -> int:
        return len(self._sequences) or -1

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return not self.kept.mixers

    @not_compiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note that a layer gives its new keys and values to the cache, and return them alone: attention finds the others itself.

        They are kept as attention gets them: latents of MLA, of which some models give the cache, have become keys by then.
        """
        call = self._call
        if call is None:
            raise ValueError(
                "a RingCache is given to a model that is not attached, or to a part of one: call the attached model, which the cache "
                "was made for"
            )
        call.layer = layer_idx
        return key_states, value_states

    def begin(self, model: Any, attachment: Attachment, kwargs: dict[str, Any]) -> tuple[Attachment, dict[str, Any]]:
        """Before a model runs: agree on its tokens, make room for them, and take this rank's part of them. Called by the model's hook.

        Returns the call's attachment, and the arguments that the model shall run with. Raises ValueError, on every rank, for bad input, and
        `OutOfPages` if there is no room.
        """
        ranks = attachment.ranks
        # what an interrupted call has left
        self._settle()
        with refusing(ranks):
            if attachment is not self._fitting:
                check_decodes(model, attachment)
                self._check_fits(model, attachment)
                self._fitting = attachment
            check_cache_name(model, kwargs, self)
            inputs = check_inputs(model, kwargs, [x.length for x in self._sequences], self._seen, self._visible)
        if ranks.size > 1:
            agree_on_tokens(self.paged.pool, inputs, self._seen, self._drawn)
        is_first = not self._seen
        if is_first:
            self.reset()
            inputs = inputs.without_repeats()
            self._sequences = [self.paged.add() for _ in inputs.ids]
        lengths = [sequence.length for sequence in self._sequences]
        try:
            with refusing(ranks):
                layout = (
                    prompt_layout(self._layout, inputs.tokens, ranks.size, self.kept)
                    if is_first or inputs.tokens > _MOST_ALIKE
                    else None
                )
                if max(lengths) + inputs.tokens > self.paged.max_tokens:
                    raise OutOfPages(
                        f"a row would have {max(lengths) + inputs.tokens} tokens, but the pages of all ranks hold {self.paged.max_tokens}: "
                        "make the RingCache with more tokens="
                    )
            batch = self.paged.extend(self._sequences, inputs.tokens)
        except ValueError:
            if is_first:
                self.reset()
            raise
        self._call = call = CachedCall(self, inputs, batch, layout, attachment, lengths)
        of_call = replace(attachment, fixed_layout=layout, of_call=attachment.attached, cached=call)
        return of_call, call.arguments(model, kwargs, ranks.rank)

    def commit(self, call: CachedCall) -> None:
        """After a model ran: its tokens are cached, without those that filled rows up."""
        for sequence, length, count in zip(self._sequences, call.lengths, call.inputs.counts, strict=True):
            if length + count < sequence.length:
                self.paged.truncate(sequence, length + count)
        self.states = {number: layer.after for number, layer in call.calls.items()}
        if len(call.inputs.rows) > len(self._sequences):
            self._choose(call.inputs.rows)
        self._seen += call.inputs.columns
        self._visible = call.inputs.visible
        self._call = None
        self._drawn = generators(self.paged.pool.device)

    def roll_back(self) -> None:
        """After a model failed: as before its call."""
        call, self._call = self._call, None
        if call is None:
            return
        for sequence, length in zip(self._sequences, call.lengths, strict=True):
            self.paged.truncate(sequence, length)
        if not self._seen:
            self.reset()

    def __repr__(self) -> str:
        lengths = [sequence.length for sequence in self._sequences]
        return f"RingCache(lengths={lengths}, paged={self.paged!r})"

    def _settle(self) -> None:
        if self._call is not None:
            self.roll_back()

    def _choose(self, rows: Sequence[int]) -> None:
        """Keep the sequences and states of these rows, each but the first of one row a fork; free those of other rows."""
        taken: set[int] = set()
        found = []
        for row in rows:
            found.append(self.paged.fork(self._sequences[row]) if row in taken else self._sequences[row])
            taken.add(row)
        for row, sequence in enumerate(self._sequences):
            if row not in taken:
                self.paged.free(sequence)
        self._sequences = found
        self.states = chosen_states(self.states, rows)

    def _check_fits(self, model: Any, attachment: Attachment) -> None:
        own, theirs = self.paged.pool.context.ranks, attachment.ranks
        if own is not theirs:
            raise ValueError(
                f"the cache was made for {own.size} ranks and {type(model).__name__} is attached to {theirs.size}, in another group: make "
                "a RingCache for each group"
            )
        heads = CachedHeads.of(model)
        if heads != self.kept:
            raise ValueError(
                f"the cache was made for a model of {self.kept}, but {type(model).__name__} has {heads}: make a RingCache for each model"
            )


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer of a `RingCache`: its cache answers."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: RingCache) -> None:
        super().__init__()
        # a cycle of references would keep the pages until Python looks for cycles
        self._cache = weakref.ref(cache)

    @property
    def cache(self) -> RingCache:
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: pages are made with the cache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        return self.cache.update(key_states, value_states, self.cache.layers.index(self))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.get_max_length()
