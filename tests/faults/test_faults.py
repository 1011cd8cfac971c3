"""Something happens to one rank at some phase of its calls: all others name it and are out within seconds, and nothing stays behind."""

import os
import re

import pytest
from scenes import PHASES, Scene

# a machine with more work than processors is slower by as much
BUSY = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
SOON = 5.0 * BUSY  # seconds after an end that the others can see, or after the group's timeout
TIMEOUT = 3.0 * min(BUSY, 6.0)  # seconds, of groups whose ranks wait so long
HOPS = PHASES[3:]


def judge(scenes, outcomes, message, *, late=False, finishers=()):
    """Each survivor's error matches `message`, which may name the {victim}, and comes in time; only in the phases `finishers` may a rank
    have all that it needs. Returns the survivors' reports."""
    reports = []
    for scene, outcome in zip(scenes, outcomes, strict=True):
        assert outcome.hung == [], scene
        assert outcome.files == [], scene
        survivors = [rank for rank in range(scene.world) if rank != scene.victim]
        assert set(survivors) <= set(outcome.reports), scene
        failed = [rank for rank in survivors if "error" in outcome.reports[rank]]
        assert failed == survivors or (failed and scene.phase in finishers), (scene, outcome.reports)
        for rank in failed:
            report = outcome.reports[rank]
            assert re.search(message.format(victim=rf"rank (\d \(rank )?{scene.victim}\b"), report["error"]), (scene, report)
            assert report["ended"] - outcome.happened < SOON + late * scene.timeout, (scene, report)
            # gloo itself connects, in a thread that cannot be ended, until the group's timeout
            connecting = scene.apart and scene.phase == "connect"
            assert report["descriptors"] <= 0 or connecting, (scene, report)
            reports.append(report)
    return reports


def everywhere(act, phases):
    """Scenes of rings of 2 to 4 ranks and of a grid, with another victim each."""
    shapes = [(2, 1, False), (3, 0, False), (4, 2, False), (4, 3, True)]
    return [Scene(world, victim, phase, act, grid=grid) for phase in phases for world, victim, grid in shapes]


@pytest.mark.parametrize("phases", [PHASES[:2], PHASES[2:4], PHASES[4:6], PHASES[6:]], ids=" and ".join)
@pytest.mark.some(1)
def test_a_killed_rank_is_named(perform, phases):
    scenes = everywhere("kill", phases)
    message = r"^RuntimeError: {victim}.* has ended, and this rank waits for it: look at the output of rank"
    reports = judge(scenes, perform(scenes), message, finishers=("last hop", "gradients home"))
    if set(phases) <= set(HOPS):
        # what gloo has said is kept; a rank that has not begun the pass learns it from the records
        assert any("pair.cc" in report["cause"] for report in reports)


def test_a_rank_that_ends_with_an_error_is_named(perform):
    scenes = [Scene(3, 1, phase, "raise") for phase in PHASES]
    judge(scenes, perform(scenes), r"{victim} has ended, and this rank waits for it", finishers=("last hop", "gradients home"))


def test_a_stopped_rank_is_named_after_the_timeout(perform):
    scenes = [Scene(3, 1, phase, "stop", timeout=TIMEOUT) for phase in ("connect", "agree", "first hop", "backward")]
    # a rank that waits for it may be late before it
    named = r"{victim} has not .*: process \d+ is stopped|has not .*, and {victim} is stopped \(process \d+\)"
    judge(scenes, perform(scenes), rf"({named}): let it go on, or end it", late=True)


def test_a_rank_that_no_longer_takes_part_is_named_after_the_timeout(perform):
    scenes = [Scene(3, 1, phase, "catch", timeout=TIMEOUT) for phase in ("first call", "backward")]
    judge(scenes, perform(scenes), r"{victim} has not .*: find out where it hangs, and look at its output", late=True)


@pytest.mark.thorough
def test_a_rank_on_another_host_is_named(perform):
    scenes = [Scene(3, 1, phase, "kill", apart=True) for phase in ("first call", "connect", "agree", "first hop", "backward")]
    # without memory in common, a rank that leaves because of another one is taken for an ended one by those that come later
    judge(
        scenes,
        perform(scenes),
        r"ranks? [\d, ]*{victim}[\d, ]* (has|have) (ended, and this rank waits|not done)".replace("{victim}", "1"),
    )


def test_a_refusal_in_the_first_call_reaches_all(perform):
    (outcome,) = perform([Scene(3, 2, "first call", "refuse")])
    assert outcome.hung == []
    for rank in range(3):
        reason = "q has 4 tokens, but rank 2 of layout zigzag(seq_len=3, world_size=3) holds 1"
        told = "" if rank == 2 else "rank 2 refused the input: rank 2: "
        assert outcome.reports[rank]["error"].startswith(f"ValueError: {told}{reason}")


def test_a_lost_store_is_an_error_until_the_ranks_are_connected(perform):
    scenes = [Scene(3, "store", phase, "kill", timeout=TIMEOUT) for phase in ("first call", "connect")]
    scenes += [Scene(3, 0, phase, "kill", served_by=0, timeout=TIMEOUT) for phase in ("first call", "connect", "first hop")]
    after = Scene(3, "store", "agree", "kill")
    *outcomes, later = perform([*scenes, after])
    lost = (
        "the job's store is lost: look at the output of the process that serves it, rank 0 of the job, unless a launcher serves it"
    )
    # ranks that find it lost end, and others may see that first; a rank that was just about to connect to it waits for the timeout
    told = rf"^RuntimeError: ({lost}|ranks? .* (has|have) ended, and this rank waits for|the job's store does not answer)"
    reports = judge(scenes[:3], outcomes[:3], told, late=True)
    assert any(lost in report["error"] for report in reports)
    # a rank may lose the store before it has learnt of the other ranks' processes
    told = f"^RuntimeError: ({{victim}} has ended, and this rank waits for it|{lost}|the job's store does not answer)"
    judge(scenes[3:], outcomes[3:], told, late=True)
    assert [report["result"] for report in later.reports.values()] == [True] * 3


@pytest.mark.thorough
def test_a_store_that_does_not_answer_is_an_error(perform):
    # the call to the store itself cannot be ended: its connection stays open until the store answers
    scenes = [
        Scene(2, "store", "first call", "stop", timeout=TIMEOUT),
        Scene(2, 0, "connect", "stop", served_by=0, timeout=TIMEOUT),
    ]
    apart, served = perform(scenes)
    assert not apart.hung
    for report in apart.reports.values():
        assert re.search("the job's store does not answer: look at the process that serves it", report["error"])
        assert report["ended"] - apart.happened < TIMEOUT + SOON
    silent = r"rank 0 has not made this call .*process \d+ is stopped|the job's store does not answer"
    assert re.search(silent, served.reports[1]["error"])


def test_a_rank_may_end_without_destroying_its_groups(perform):
    (outcome,) = perform([Scene(2, 0, "first call", "leave")])
    assert [report["result"] for report in outcome.reports.values()] == [True, True]
    assert not any("Error" in text or "Exception" in text for text in outcome.printed.values()), outcome.printed
