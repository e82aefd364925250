"""Context tree switching straight from its equations: slow, and sharing no code with cbsql."""

import math

CONTEXT = ((0, -1), (-1, 0), (-1, -1), (-1, 1))  # (dy, dx) of left, up, up-left, up-right


class Node:
    def __init__(self, levels: int) -> None:
        self.levels = levels
        self.counts = [0] * levels
        self.stay = 0.5
        self.children: dict[int, Node] = {}

    def estimate(self, symbol: int) -> float:
        return (self.counts[symbol] + 1 / self.levels) / (sum(self.counts) + 1)

    def copy(self, contexts: list[list[int]]) -> "Node":
        """A node that can be updated with these contexts and leaves this one alone."""
        node = Node(self.levels)
        node.counts, node.stay, node.children = list(self.counts), self.stay, dict(self.children)
        for symbol in {context[0] for context in contexts if context} & node.children.keys():
            below = [context[1:] for context in contexts if context and context[0] == symbol]
            node.children[symbol] = node.children[symbol].copy(below)
        return node

    def probability(self, context: list[int], symbol: int) -> float:
        if not context:
            return self.estimate(symbol)
        child = self.children.get(context[0], Node(self.levels))
        below = child.probability(context[1:], symbol)
        return self.stay * self.estimate(symbol) + (1 - self.stay) * below

    def update(self, context: list[int], symbol: int, alpha: float) -> float:
        """Learn the symbol; return its probability before."""
        estimate = self.estimate(symbol)
        self.counts[symbol] += 1
        if not context:
            return estimate
        child = self.children.setdefault(context[0], Node(self.levels))
        below = child.update(context[1:], symbol, alpha)
        w = self.stay
        stay = (1 - alpha) * w * estimate + alpha * (1 - w) * below
        split = (1 - alpha) * (1 - w) * below + alpha * w * estimate
        self.stay = stay / (stay + split)
        return w * estimate + (1 - w) * below


class NaiveCTS:
    def __init__(
        self, shape: tuple[int, int], levels: int, location_dependent: bool = True
    ) -> None:
        self.height, self.width = shape
        self.trees = [Node(levels) for _ in range(shape[0] * shape[1] if location_dependent else 1)]
        self.updates = [0] * len(self.trees)

    def _pixels(self, frame):
        for y in range(self.height):
            for x in range(self.width):
                context = [
                    int(frame[y + dy, x + dx]) if y + dy >= 0 and 0 <= x + dx < self.width else 0
                    for dy, dx in CONTEXT
                ]
                yield (y * self.width + x) % len(self.trees), context, int(frame[y, x])

    def log_prob(self, frame) -> float:
        return math.fsum(
            math.log(self.trees[tree].probability(context, symbol))
            for tree, context, symbol in self._pixels(frame)
        )

    def log_prob_after(self, frame) -> float:
        """log rho' by learning the frame in copies of the trees, of which only it is kept."""
        kept, updates = self.trees, list(self.updates)
        paths = {tree: [] for tree in range(len(self.trees))}
        for tree, context, _ in self._pixels(frame):
            paths[tree].append(context)
        self.trees = [node.copy(paths[tree]) for tree, node in enumerate(kept)]
        self.update(frame)
        after = self.log_prob(frame)
        self.trees, self.updates = kept, updates
        return after

    def update(self, frame) -> None:
        for tree, context, symbol in self._pixels(frame):
            self.updates[tree] += 1
            self.trees[tree].update(context, symbol, alpha=1 / (self.updates[tree] + 1))
