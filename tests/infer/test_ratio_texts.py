"""Verification by ratio, text by text: 100,000 simulated drafts of one shape, side by side.

The law of a text is known, since the two models are tables: chains, trees and graphs of drafts must
give it up to the noise of so many draws, and forms that are not exact must not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.engine.pick import conditional_distribution, draw

V, DEPTH, N = 6, 3, 100_000


@dataclass(frozen=True)
class Shape:
    """How the simulated draft grows: candidates of a node, levels, merging, pruning, the budget."""

    k: int
    tau: int | None = None  # nodes of one level that end in the same tau tokens are one
    theta: float = 0.0  # a node below is a leaf
    most: int = 99  # nodes of a level that have children, the likeliest


SHAPES = {
    "chain": Shape(1),
    "tree": Shape(3),
    "pruned tree": Shape(3, theta=0.15, most=4),
    "graph": Shape(3, tau=1),
    "pruned graph": Shape(3, tau=1, theta=0.15, most=4),
    "wide graph": Shape(4, tau=1, most=6),
}


@cache
def models(distance: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """p and q by depth: (V^depth, V) probabilities after each text, which is its tokens in base V."""
    generator = torch.Generator().manual_seed(5)
    logits = [1.2 * torch.randn(V**d, V, generator=generator, dtype=torch.float64) for d in range(DEPTH)]
    drafts = [x + distance * torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in logits]
    return [x.softmax(-1) for x in logits], [x.softmax(-1) for x in drafts]


@dataclass(frozen=True)
class Level:
    """Side by side: `texts` (N, W) of the nodes that are `there`, the `q` (N, W, V) of their children
    and these (N, W, k) themselves, -1 where there are none.
    """

    texts: Tensor
    there: Tensor
    q: Tensor
    children: Tensor


def drafted(shape: Shape, generator: torch.Generator) -> list[Level]:
    """N trees, level by level: merging, pruning and the budget know what is above, never what is below."""
    texts = torch.zeros(N, 1, dtype=torch.int64)
    there, chance, joint = texts == 0, torch.ones(N, 1).double(), torch.ones(N, 1).double()
    levels = []
    for depth in range(DEPTH):
        # The first node of the level that ends in the same tokens, itself where none comes before.
        end = torch.where(there, texts % V ** (shape.tau or DEPTH), -1 - torch.arange(texts.shape[1]))
        first = (end[:, :, None] == end[:, None, :]).byte().argmax(-1)
        q = models()[1][depth][texts.gather(1, first)]
        children = draw(models()[1][depth][texts].flatten(0, 1), shape.k, generator)
        children = children.view(N, -1, shape.k).gather(1, first[..., None].expand(-1, -1, shape.k))
        rank = torch.where(there, joint, 0.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        expanded = there & (chance >= shape.theta) & (rank < shape.most)
        children = torch.where(expanded[..., None], children, -1)
        levels.append(Level(texts, there, q, children))
        chance = q.gather(2, children.clamp(min=0)).flatten(1)
        joint = joint.repeat_interleave(shape.k, 1) * chance
        texts = (texts[..., None] * V + children).flatten(1)
        there = (children >= 0).flatten(1)
    return levels


Verify = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]


def by_ratio(p: Tensor, q: Tensor, children: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(conditional_distribution(p, q, children), 1, generator=generator)


def walked(levels: list[Level], verify: Verify, generator: torch.Generator) -> Tensor:
    """(N,) the first three tokens; what follows a text that left the tree is drawn plainly."""
    text = torch.zeros(N, 1, dtype=torch.int64)
    node, inside = torch.zeros(N, 1, dtype=torch.int64), torch.ones(N, 1, dtype=torch.bool)
    for depth, level in enumerate(levels):
        at = node[..., None]
        p = models()[0][depth][text[:, 0]]
        q = level.q.gather(1, at.expand(-1, -1, V))[:, 0]
        children = level.children.gather(1, at.expand(-1, -1, level.children.shape[2]))[:, 0]
        children = torch.where(inside, children, -1)
        token = verify(p, q, children, generator)
        accepted = children == token
        inside = accepted.any(1, keepdim=True)
        node = node * children.shape[1] + accepted.double().argmax(1, keepdim=True)
        node, text = torch.where(inside, node, 0), text * V + token
    return text[:, 0]


def the_law() -> Tensor:
    """(V^3,) the target's probability of every text of three tokens."""
    item, two, three = models()[0]
    return (item[0][:, None, None] * two[:, :, None] * three.view(V, V, V)).flatten()


def variation(texts: Tensor) -> float:
    """Total variation of the N texts from the target's law."""
    shares = torch.bincount(texts, minlength=V**DEPTH).double() / N
    return float((shares - the_law()).abs().sum() / 2)


@cache
def noise_level() -> float:
    """What one in a thousand exact samplers of N texts exceeds."""
    exact = the_law().numpy() / float(the_law().sum())
    counts = np.random.default_rng(0).multinomial(N, exact, size=2000)
    return float(np.quantile(np.abs(counts / N - exact).sum(1) / 2, 0.999))


@pytest.mark.parametrize("name", SHAPES)
def test_texts_are_distributed_as_the_targets(name: str) -> None:
    """Total variation over 100,000 texts of three tokens at the level of noise."""
    generator = torch.Generator().manual_seed(11)
    assert variation(walked(drafted(SHAPES[name], generator), by_ratio, generator)) < noise_level()


def no_residual(p: Tensor, q: Tensor, children: Tensor, generator: torch.Generator) -> Tensor:
    """GSD §3 to the letter, for each candidate in turn; a token that none becomes is generated anew."""
    token = torch.multinomial(p, 1, generator=generator)
    for c in children.flip(1).split(1, dim=1):
        ratio = p.gather(1, c.clamp(min=0)) / q.gather(1, c.clamp(min=0))
        token = torch.where((c >= 0) & (torch.rand(N, 1, generator=generator) < ratio), c, token)
    return token


def longest_of_several(chains: list[list[Level]], generator: torch.Generator) -> Tensor:
    """GSD §4.1 and §6.4: every path by itself, the longest is taken."""
    texts, lengths = [], []
    for levels in chains:
        text, alive, length = torch.zeros(N, 1, dtype=torch.int64), torch.ones(N, 1, dtype=torch.bool), 0
        for depth, level in enumerate(levels):
            p, c = models()[0][depth][text[:, 0]], level.children[:, 0]
            sure = torch.rand(N, 1, generator=generator) * level.q[:, 0].gather(1, c) < p.gather(1, c)
            alive = alive & sure
            text = text * V + torch.where(alive, c, torch.multinomial(p, 1, generator=generator))
            length = length + alive.long()
        texts.append(text)
        lengths.append(length)
    return torch.cat(texts, 1).gather(1, torch.cat(lengths, 1).argmax(1, keepdim=True))[:, 0]


def with_other_children(levels: list[Level], change: Callable[[Level], Tensor]) -> list[Level]:
    return [replace(level, children=torch.where(level.children >= 0, change(level), -1)) for level in levels]


def test_the_test_has_teeth() -> None:
    """The paper's forms fail it, and a draft that moves candidates once they are drawn, or lets them decide
    whether they or all of their family are verified."""
    generator = torch.Generator().manual_seed(3)
    chain, tree = (drafted(SHAPES[name], generator) for name in ("chain", "tree"))

    def replaced(level: Level) -> Tensor:
        return torch.multinomial(level.q.flatten(0, 1), 3, True, generator=generator).view_as(level.children)

    def ranked(level: Level) -> Tensor:
        chances = level.q.gather(2, level.children.clamp(min=0))
        return level.children.gather(2, chances.argsort(dim=2, descending=True))

    def thinned(level: Level) -> Tensor:
        return torch.where(level.q.gather(2, level.children.clamp(min=0)) < 0.15, -1, level.children)

    def chosen(level: Level) -> Tensor:
        likeliest = level.q.gather(2, level.children.clamp(min=0)).amax(2, keepdim=True)
        return torch.where(likeliest < level.q.amax(2, keepdim=True), -1, level.children)

    several = [chain, *(drafted(SHAPES["chain"], generator) for _ in range(2))]
    result = {
        "no residual": walked(chain, no_residual, generator),
        "longest of several": longest_of_several(several, generator),
        "no residual, several": walked(tree, no_residual, generator),
        "no residual, with replacement": walked(with_other_children(tree, replaced), no_residual, generator),
        "ranked by chance": walked(with_other_children(tree, ranked), by_ratio, generator),
        "thinned by chance": walked(with_other_children(tree, thinned), by_ratio, generator),
        "families by chance": walked(with_other_children(tree, chosen), by_ratio, generator),
    }
    assert all(variation(texts) > 1.5 * noise_level() for texts in result.values())
