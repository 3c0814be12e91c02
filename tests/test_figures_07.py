"""The figures of notebook 07 say what they were given."""

from pathlib import Path
from typing import Any

import test_elastic_lab
from test_figures_06 import colors, rgb, words

from course_lib.lab import fig07
from course_lib.lab.exercises import n07
from course_lib.lab.plots import BLUE, GREEN
from course_lib.lab.pods_manifest import MANIFEST, job_with
from course_lib.lab.pytorchjob import read_job

run = test_elastic_lab.run
FOUR = ('nprocPerNode: "1"', 'nprocPerNode: "4"')


def test_pods_show_what_the_operator_tells_them_and_their_ranks() -> None:
    said = words(fig07.pods(read_job(MANIFEST)))
    assert {"gpt-master-0", "gpt-worker-1", "rank 0", "rank 2", "all meet at gpt-master-0:23456"} <= set(said)
    assert any("WORLD_SIZE = 3" in text and "RANK = 2" in text for text in said)
    assert any("claim snapshots, at /snapshots" in text for text in said)
    many = words(fig07.pods(job_with(FOUR)))
    assert {str(rank) for rank in range(12)} <= set(many)
    assert sum("WORLD_SIZE = 12" in text for text in many) == 3
    without = job_with(("persistentVolumeClaim: {claimName: snapshots}", "emptyDir: {}"))
    assert "no shared volume" in words(fig07.pods(without))


def test_an_elastic_job_is_drawn_without_a_master() -> None:
    said = words(fig07.pods(read_job("scripts/cluster/pytorchjob-elastic.yaml")))
    assert "all meet at gpt-elastic-worker-0:23456" in said and any("PET_NNODES = 2:3" in text for text in said)


def test_rules_are_those_of_the_learners_function() -> None:
    figure = fig07.rules(n07.next_move_of)
    found = colors(figure)
    assert (found.count(rgb(GREEN)), found.count(rgb(BLUE))) == (4 + 5, 2)
    assert fig07.rules(lambda policy, code: "same pod").axes[0].patches[0].get_facecolor()[:3] == rgb(GREEN)

    def unfilled(policy: str, code: int) -> Any: ...

    def nonsense(policy: str, code: int) -> Any:
        return ["same pod"]

    for bad in (unfilled, nonsense, lambda policy, code: 1 / 0):
        assert words(fig07.rules(bad)).count("?") == len(fig07.POLICIES) * len(fig07.CODES)


def test_the_timeline_has_a_lane_for_each_pod(run: Path) -> None:
    said = words(fig07.timeline(run, run))
    assert {"a", "b", "killed"} <= set(said) and not any(text.startswith("node ") for text in said)


def test_learning_compares_with_both_baselines() -> None:
    training = {"held_out": [2.1, 1.5], "bigram": 2.3, "uniform": 4.6}
    said = words(fig07.learning(training, [2.2]))
    wanted = {"a table of character pairs: 2.30", "every character equally likely: 4.60", "yours, one epoch: 2.20"}
    assert wanted | {"recorded, 2 epochs: 1.50"} <= set(said)
    assert not any("yours" in text for text in words(fig07.learning(training)))
