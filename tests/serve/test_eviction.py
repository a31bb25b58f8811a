"""What eviction learns, against counts made by hand."""

from __future__ import annotations

from collections.abc import Callable

from perilune.serve.cache import Eviction, Node


def node(number: int, depth: int = 100) -> Node:
    root = Node(-1, None, [], 0, 0)
    made = Node(number, root, [number], 0, depth)
    made.state, made.kind = [number], "turn"
    root.children[number] = made
    return made


def one_page(_: Node) -> int:
    return 1


def test_a_class_that_is_reused_at_an_age_is_worth_more_at_it() -> None:
    eviction = Eviction("gain")
    for i in range(200):
        hot, cold = node(i), node(1000 + i)
        cold.kind = "fork"
        eviction.used(hot, 10.0)  # age 10 since `seen` = 0
        eviction.age([cold], 10.0)
    hot, cold = node(1), node(2)
    cold.kind = "fork"
    assert eviction.scores(hot, 10.0, one_page)[0] > 5 * eviction.scores(cold, 10.0, one_page)[0]


def test_the_rate_falls_with_age_when_nothing_is_known() -> None:
    eviction = Eviction("gain")
    scores = [eviction.scores(node(1), age, one_page)[0] for age in (0.0, 1.0, 10.0, 100.0, 1000.0)]
    assert scores == sorted(scores, reverse=True)
    assert eviction.scores(node(1, 200), 1.0, one_page)[0] == 2 * eviction.scores(node(1, 100), 1.0, one_page)[0]


def test_the_order_whose_ghosts_are_asked_for_loses_its_rule() -> None:
    eviction = Eviction("auto")
    assert eviction.ruler == 0
    gone, rival = node(1), node(2)
    eviction.evicted(gone, (gone, rival), one_page)  # gain evicts `gone`, lru would have evicted `rival`
    eviction.asked([(gone.end, gone.keys[-1])])
    assert eviction.ruler == 1
    assert eviction.loss == [100.0, 0.0]
    eviction.used(rival, 5.0)  # the duel is over: no second verdict
    assert eviction.loss == [100.0, 0.0]


def test_a_rival_that_is_used_first_speaks_for_the_ruling_order() -> None:
    eviction = Eviction("auto")
    gone, rival = node(1), node(2)
    eviction.evicted(gone, (gone, rival), one_page)
    eviction.used(rival, 5.0)
    assert eviction.loss == [0.0, 100.0]
    eviction.asked([(gone.end, gone.keys[-1])])
    assert eviction.loss == [0.0, 100.0]


def test_a_fixed_order_keeps_no_ghosts() -> None:
    eviction = Eviction("lru")
    gone, rival = node(1), node(2)
    eviction.evicted(gone, (rival, gone), one_page)
    assert not rival.ghosts
    assert eviction.ruler == 1


def test_an_order_with_scores_below_zero_comes_to_an_end() -> None:
    class Below(Eviction):
        def scores(self, node: Node, now: float, pages: Callable[[Node], int]) -> tuple[float, float]:
            return -1.0 * node.number, -1.0 * node.number

    nodes = [node(number) for number in (1, 3, 2)]
    gone: set[int] = set()
    order = Below("gain").order(nodes, 0.0, one_page, lambda one: one.number not in gone)
    for number in (3, 2, 1):
        assert next(order)[0].number == number
        gone.add(number)
