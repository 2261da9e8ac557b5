"""GSD's theta_sib beside the authors' rule: drafted tokens, and accepted drafts by their rank among siblings.

    python -m tests.benchmarks.sibling_pruning TARGET DRAFT PROMPTS.jsonl [KEY] [--count 12] [--new 64]
        [--theta_sib 0 0.3 0.7]

Greedy, in float64, on the first halves of texts; k=4, depth=10, theta_prob=0.2, tau=2, 100 verified nodes. Of
every step but a text's last:

    ours       the product's decoder
    rule       the reference: each path is a forward of its own, the text is Transformers'; no cache, no tree
    authors    the graph that the authors' program draws, with its other differences (docs/papers.md), likewise

The command fails if ours and the rule differ in a number. The last line is JSON.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from infer.api import Model, load
from infer.bench.gsd import CHILDREN, StepCounts, decode_prompt
from infer.config import DecodeConfig
from infer.trees.growth import Rules
from tests.benchmarks.shapes import held_out_prompts
from tests.infer.trees import literal

NODES = 100


@dataclass
class Drafting:
    """Steps, the tokens drafted in them (merged nodes are not drafted anew), and ranks of accepted drafts."""

    steps: int = 0
    drafted: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: int, ranks: Sequence[int]) -> None:
        """Count a step."""
        self.steps += 1
        self.drafted += drafted
        self.ranks.update(ranks)

    @property
    def shares(self) -> list[float]:
        """The share of each rank in the accepted drafts."""
        return [
            self.ranks[rank] / max(1, self.ranks.total())
            for rank in range(1, CHILDREN + 1)
        ]


Step = Callable[[int, literal.Model, Sequence[int], Rules], tuple[int, list[int]]]


def ours(
    model: Model, prompts: Sequence[Sequence[int]], rules: Rules, new: int
) -> Drafting:
    """Count the product's drafts."""
    decode = DecodeConfig("gsd", nodes=NODES, max_new_tokens=new, **asdict(rules))
    result = Drafting()
    for seed, ids in enumerate(prompts):
        for outcome in decode_prompt(model, ids, decode, seed).outcomes:
            counts = StepCounts.of(outcome)
            result.add(counts.nodes, counts.ranks)
    return result


def reference(
    step: Step, model: Model, prompts: Sequence[Sequence[int]], rules: Rules, new: int
) -> Drafting:
    """Count the drafts of `step` along the target's own texts: it returns the number of tokens drafted behind a
    root, and the ranks of those that are accepted, given the text that follows.
    """
    assert model.draft is not None
    result = Drafting()
    for ids in prompts:
        text = greedy_text(model, ids, new)
        done = 0
        while True:
            context = [*ids, *text[:done]]
            behind = model_behind(model.draft.lm, context[:-1], rules.k)
            # A draft leaves room for the target's own token.
            drafted, ranks = step(
                context[-1], behind, text[done : done + new - done - 1], rules
            )
            done += len(ranks) + 1
            if done >= len(text):
                break
            result.add(drafted, ranks)
    return result


def greedy_text(model: Model, ids: Sequence[int], new: int) -> list[int]:
    """Return the target's greedy continuation by Transformers' own decoding."""
    prompt = torch.tensor([list(ids)])
    whole = model.lm.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=sorted(model.eos) or None,
        pad_token_id=0,
    )
    return whole[0, len(ids) :].tolist()


def model_behind(lm: PreTrainedModel, context: Sequence[int], k: int) -> literal.Model:
    """Return a function from a path behind a context to its k likeliest next tokens, with their chances."""

    @cache
    def likeliest(path: tuple[int, ...]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logits = lm(torch.tensor([[*context, *path]]), logits_to_keep=1).logits[
                0, -1
            ]
        chances, ids = logits.softmax(-1).topk(k)
        return list(zip(ids.tolist(), chances.tolist()))

    return likeliest


def rule_step(
    root: int, behind: literal.Model, text: Sequence[int], rules: Rules
) -> tuple[int, list[int]]:
    """Draft by the paper's graph with the authors' theta_sib; verify its likeliest paths."""
    depth = len(text)
    nodes = literal.draw(
        root, behind, **(asdict(rules) | {"depth": min(rules.depth, depth)})
    )
    ranks: list[int] = []
    node = nodes[0]
    chance = 1.0
    for token in text:
        tokens = [child.token for child in node.successors]
        if token not in tokens:
            break
        node = node.successors[tokens.index(token)]
        chance *= node.chance
        if likelier(nodes[0], depth, chance) >= NODES:
            break
        ranks.append(1 + tokens.index(token))
    return sum(node.into is None for node in nodes[1:]), ranks


def likelier(node: literal.Node, depth: int, least: float, chance: float = 1.0) -> int:
    """Return how many paths of the unmerged tree below a node are likelier than `least`."""
    result = 0
    for child in node.successors if depth else ():
        joint = chance * child.chance
        if joint > least:
            result += 1 + likelier(child, depth - 1, least, joint)
    return result


@dataclass(eq=False)
class AuthorsNode:
    """A node of the authors' graph. `ranks` are those of all candidates behind it that theta_sib leaves."""

    path: tuple[int, ...]
    leaf: bool = False
    children: list["AuthorsNode"] = field(default_factory=list)
    repeated: "AuthorsNode | None" = None
    ranks: dict[int, int] = field(default_factory=dict)


def authors_step(
    root: int, behind: literal.Model, text: Sequence[int], rules: Rules
) -> tuple[int, list[int]]:
    """Draft as the authors' program does; verify its tree breadth first, up to NODES and a node's children."""
    nodes = authors_graph(root, behind, rules, depth=min(rules.depth, len(text)))
    tree: list[tuple[AuthorsNode, int]] = [(nodes[0], -1)]  # with the parent's place
    for place, (node, _) in enumerate(tree):  # grows as it is read
        if len(tree) >= NODES:
            break
        tree += [(child, place) for child in node.children]
        if node.repeated:
            tree.append((node.repeated, place))
    place = 0
    ranks: list[int] = []
    for token in text:
        after = [
            i
            for i, (node, parent) in enumerate(tree)
            if parent == place and node.path[-1] == token
        ]
        if not after:
            break
        ranks.append(tree[place][0].ranks[token])
        place = after[0]
    return len(nodes) - 1, ranks


def authors_graph(
    root: int, behind: literal.Model, rules: Rules, depth: int
) -> list[AuthorsNode]:
    """Draft level by level: leaves get children too, all of them leaves, while a node that is none was drafted.
    Repetition is looked for before theta_prob, and a node has one repeated child, the last.
    """
    nodes = [AuthorsNode((root,))]
    level = list(nodes)
    for _ in range(depth):
        below: list[AuthorsNode] = []
        for node in level:
            likeliest = behind(node.path)
            best = max(chance for _, chance in likeliest)
            rest = [
                (token, chance)
                for token, chance in likeliest
                if chance >= rules.theta_sib * best
            ]
            for rank, (token, chance) in enumerate(rest, 1):
                node.ranks[token] = rank
                child = AuthorsNode(
                    (*node.path, token), node.leaf or chance < rules.theta_prob
                )
                earlier = first_repeated(child, nodes, rules.tau)
                if earlier:
                    node.repeated = earlier
                    continue
                node.children.append(child)
                nodes.append(child)
                below.append(child)
        level = below
        if all(node.leaf for node in level):
            break
    return nodes


def first_repeated(
    child: AuthorsNode, nodes: Sequence[AuthorsNode], tau: int | None
) -> AuthorsNode | None:
    """Return the first node that ends the same tau tokens and does not lie on the child's own path."""
    if not tau or len(child.path) < tau:
        return None
    for node in nodes:
        above = child.path[: len(node.path)] == node.path
        if (
            not above
            and len(node.path) >= tau
            and node.path[-tau:] == child.path[-tau:]
        ):
            return node
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("key", nargs="?", default="content")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--theta_sib", type=float, nargs="+", default=[0.0, 0.3, 0.7])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load(args.target, "float32", draft=args.draft)
    assert model.draft is not None
    model.lm.double()
    model.draft.lm.double()
    prompts = [
        prompt.ids
        for prompt in held_out_prompts(args.target, args.prompts, args.key, args.count)
    ]
    rows = []
    print(
        "| theta_sib | | rank 1 | 2 | 3 | 4 | drafted tokens per step | accepted per step |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for theta in args.theta_sib:
        rules = Rules(theta_sib=theta)
        counted = {
            "ours": ours(model, prompts, rules, args.new),
            "rule": reference(rule_step, model, prompts, rules, args.new),
            "authors": reference(authors_step, model, prompts, rules, args.new),
        }
        for name, drafting in counted.items():
            shares = [round(share, 3) for share in drafting.shares]
            drafted = round(drafting.drafted / drafting.steps, 2)
            accepted = round(drafting.ranks.total() / drafting.steps, 2)
            cells = " | ".join(f"{share:.3f}" for share in shares)
            print(
                f"| {theta} | {name} | {cells} | {drafted:.2f} | {accepted:.2f} |",
                flush=True,
            )
            rows.append(
                {
                    "theta_sib": theta,
                    "name": name,
                    "shares": shares,
                    "drafted": drafted,
                    "accepted": accepted,
                }
            )
        if counted["ours"] != counted["rule"]:
            raise SystemExit(
                f"theta_sib={theta}: {counted['ours']} differs from {counted['rule']}"
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
