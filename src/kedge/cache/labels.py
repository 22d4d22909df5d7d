"""Labels: who ends a fixed prompt where, and the least step of everything below (KVFlow, section 3.1).

The step stands on the node that ends the fixed prompt and bubbles up as a minimum; what follows it is varying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kedge.cache.node import Handle, LabelKey, TreeNode
from kedge.errors import PlanError
from kedge.structures.step_counts import StepCounts


class Labels:
    """One label per key. `offer` is called with every node whose priority changed."""

    def __init__(self, offer: Callable[[TreeNode], None]) -> None:
        self._offer = offer
        self._handles: dict[LabelKey, Handle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def node(self, key: LabelKey) -> TreeNode | None:
        """Return the node that ends the fixed prompt of `key`, while it is in the tree."""
        handle = self._handles.get(key)
        return None if handle is None else handle.node

    def put(self, key: LabelKey, node: TreeNode, step: float) -> None:
        """Label `node`; the label that `key` had elsewhere goes."""
        if self.node(key) is not node:
            self.drop(key)
            self._handles[key] = Handle.of(node)
            for above in node.path():
                above.varying = False
            if not node.labels:
                self._mark_varying_below(node)
        self._set(key, node, step)

    def move(self, key: LabelKey, step: float) -> TreeNode | None:
        """Change the step of a label. Returns its node. O(depth)."""
        node = self.node(key)
        if node is not None:
            self._set(key, node, step)
        return node

    def drop(self, key: LabelKey) -> None:
        """Forget the label of `key`, if it has one."""
        if node := self.node(key):
            _change(node, node.labels.pop(key), None, self._offer)
        self._handles.pop(key, None)

    def leave(self, node: TreeNode) -> None:
        """Let the labels of `node`, which has no children and is leaving the tree, end at its parent instead.

        So what is left of a history keeps its worth. The root has no labels: with the last node they go.
        """
        labels, parent = dict(node.labels), node.parent
        node.labels.clear()
        node.generation += 1
        assert parent is not None
        if node.step is not None:
            _change(parent, node.step, None, self._offer)
        for key, step in labels.items():
            if parent.parent is None:
                del self._handles[key]
            else:
                self._handles[key] = Handle.of(parent)
                self._set(key, parent, step)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Let `upper`, which was put above `lower`, take its step. Labels mark an end, so they stay on `lower`."""
        if lower.step is not None:
            upper.steps, upper.step = StepCounts(), lower.step
            upper.steps.add(lower.step)
        upper.varying = lower.varying

    def check_integrity(self, nodes: list[TreeNode]) -> None:
        """Raise `PlanError` unless handles and labels agree and priorities are what a naive look gives."""
        found = {key: node for node in nodes for key in node.labels}
        if found != {key: handle.node for key, handle in self._handles.items()}:
            raise PlanError("labels", found, "do not agree with the handles")
        for node in nodes:
            _check_priority(node)

    def _set(self, key: LabelKey, node: TreeNode, step: float) -> None:
        old = node.labels.get(key)
        node.labels[key] = step
        _change(node, old, step, self._offer)

    def _mark_varying_below(self, node: TreeNode) -> None:
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.varying:
                continue
            if below.step is None:
                below.varying = True
                self._offer(below)
            stack.extend(below.children.values())


def _change(node: TreeNode | None, old: float | None, new: float | None, offer: Callable[[TreeNode], None]) -> None:
    """Change one of a node's steps from `old` to `new` (None: there is none), upwards while a minimum changes."""
    while node is not None and node.parent is not None and old != new:
        before = node.step
        _recount(node, old, new)
        if node.step != before:
            offer(node)
        node, old, new = node.parent, before, node.step


def _recount(node: TreeNode, old: float | None, new: float | None) -> None:
    if node.steps is None:
        node.steps = StepCounts()
    if old is not None:
        node.steps.remove(old)
    if new is not None:
        node.steps.add(new)
    node.step = node.steps.least
    if node.step is None:
        node.steps = None


def _check_priority(node: TreeNode) -> None:
    steps = [*node.labels.values(), *(child.step for child in node.children.values() if child.step is not None)]
    counts = node.steps.counts if node.steps else Counter[float]()
    if node.step != min(steps, default=None) or counts != Counter(steps):
        raise PlanError("priority", node.step, f"the least of {steps} is another one")
