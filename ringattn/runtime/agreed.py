"""`Agreed`: a call of a collective, besides attention, on which the ranks have agreed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .agree import Facts, agree, agree_backward, refusing
from .context import Context
from .order import label


@dataclass(frozen=True)
class Agreed:
    """A call that the ranks have agreed on: its facts and its number."""

    context: Context
    facts: Facts
    number: int

    @classmethod
    def now(cls, context: Context, facts: Facts, tokens: int, name: str | None = None) -> tuple[Agreed, tuple[int, ...]]:
        """Agree on a call of this group with so many tokens on this rank; the call, and the tokens of each rank."""
        counts, number = agree(context.ranks, facts, tokens, label(name))
        return cls(context, facts, number), counts

    def backward(self) -> Agreed:
        """Agree that this is the backward pass of this call, which may have one in turn."""
        ranks = self.context.ranks
        with refusing(ranks):
            ranks.order.check()
        agree_backward(ranks, self.facts, self.number)
        return replace(self, facts=self.facts.backward)
