"""Names of levels and scores."""

import numpy as np
import pytest

from seed_rl.envs import dmlab_levels
from seed_rl.envs.dmlab_levels import (
    DMLAB30,
    evaluation_level,
    expand_levels,
    human_normalized_score,
    level_of_env,
    level_path,
    mean_capped_human_normalized_score,
)
from seed_rl.user_error import UserError


def test_there_are_30_levels_of_which_two_have_variants_for_evaluation():
    assert len(DMLAB30) == 30
    variants = {name: level.test_name for name, level in DMLAB30.items() if level.test_name != name}
    assert variants == {
        "rooms_collect_good_objects_train": "rooms_collect_good_objects_test",
        "rooms_exploit_deferred_effects_train": "rooms_exploit_deferred_effects_test",
    }
    assert all(level.name == name for name, level in DMLAB30.items())
    assert all(level.human_score > level.random_score for level in DMLAB30.values())


def test_scores_of_some_levels_as_published():
    """(random, human), copied by hand from the table."""
    for name, scores in {
        "rooms_collect_good_objects_train": (0.073, 10.0),
        "language_execute_random_task": (-5.913, 254.05),
        "explore_object_rewards_many": (2.438, 106.7),
    }.items():
        assert (DMLAB30[name].random_score, DMLAB30[name].human_score) == scores


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("rooms_watermaze", "contributed/dmlab30/rooms_watermaze"),
        ("rooms_collect_good_objects_test", "contributed/dmlab30/rooms_collect_good_objects_test"),
        ("contributed/dmlab30/rooms_watermaze", "contributed/dmlab30/rooms_watermaze"),
        ("lt_chasm", "lt_chasm"),
        ("tests/empty_room_test", "tests/empty_room_test"),
        ("contributed/psychlab/glass_pattern", "contributed/psychlab/glass_pattern"),
    ],
)
def test_paths_of_the_engine(name, path):
    assert level_path(name) == path


def test_variants_for_evaluation():
    assert evaluation_level("rooms_collect_good_objects_train") == "rooms_collect_good_objects_test"
    assert evaluation_level("rooms_collect_good_objects_test") == "rooms_collect_good_objects_test"
    assert evaluation_level("contributed/dmlab30/rooms_watermaze") == "rooms_watermaze"
    assert evaluation_level("lt_chasm") == "lt_chasm"


def test_lists_of_levels():
    assert expand_levels("lt_chasm") == ("lt_chasm",)
    assert expand_levels("dmlab30") == tuple(DMLAB30)
    assert expand_levels(["lt_chasm", "dmlab30"]) == ("lt_chasm", *DMLAB30)


@pytest.mark.parametrize("levels", [(), "", ("lt_chasm", 3), [""]])
def test_wrong_lists_of_levels(levels):
    with pytest.raises(UserError, match="levels must be"):
        expand_levels(levels)


def test_levels_take_turns():
    levels = ("contributed/dmlab30/rooms_watermaze", "lt_chasm", "natlab_fixed_large_map")
    assert [level_of_env(i, levels) for i in range(5)] == [
        "rooms_watermaze",
        "lt_chasm",
        "natlab_fixed_large_map",
        "rooms_watermaze",
        "lt_chasm",
    ]
    assert level_of_env(30) == level_of_env(0) == "rooms_collect_good_objects_train"
    assert len({level_of_env(i) for i in range(30)}) == 30


def test_suggestions_are_for_names_that_are_not_known():
    hint = dmlab_levels.suggestions("Lasertag_one_oponent_small")
    assert hint.startswith(" Did you mean lasertag_one_opponent_small, ")
    assert dmlab_levels.suggestions("contributed/dmlab30/rooms_watermaze") == ""
    assert dmlab_levels.suggestions("lt_chasm") == ""


# Scores


@pytest.mark.parametrize(
    ("level", "returns", "expected"),
    [
        ("rooms_watermaze", 54.0, 100.0),
        ("rooms_watermaze", 4.065, 0.0),
        # (279.0325 - 4.065) / (54 - 4.065) = 274.9675 / 49.935
        ("rooms_watermaze", 279.0325, 550.65084610),
        # (0 + 5.913) / (254.05 + 5.913) = 5.913 / 259.963
        ("language_execute_random_task", 0, 2.27455445),
        ("rooms_exploit_deferred_effects_test", 85.65, 100.0),
        ("contributed/dmlab30/rooms_exploit_deferred_effects_train", 8.501, 0.0),
    ],
)
def test_normalised_scores(level, returns, expected):
    score = human_normalized_score(level, returns)
    assert isinstance(score, float)
    assert score == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", [list, np.array, lambda x: np.array(x, np.float32)])
def test_normalised_scores_of_several_returns(kind):
    scores = human_normalized_score("rooms_watermaze", kind([4.065, 54.0]))
    np.testing.assert_allclose(scores, [0.0, 100.0], atol=1e-4)


def test_a_level_without_a_known_score_is_named():
    with pytest.raises(UserError, match=r"'lt_chasm'.*TaskStatistics\.score = None"):
        human_normalized_score("lt_chasm", 1.0)
    with pytest.raises(UserError, match="Did you mean rooms_watermaze"):
        human_normalized_score("roomswatermaze", 1.0)


def test_the_mean_is_of_levels_and_caps_each_of_them():
    returns = {
        "rooms_watermaze": [4.065, 104.0],  # mean 54.0325, a little above a human's
        "natlab_fixed_large_map": [2.173, 36.9, 2.173, 36.9],  # 0, 100, 0, 100: 50 %
        "explore_goal_locations_small": [7.66],  # 0 %
    }
    assert mean_capped_human_normalized_score(returns) == pytest.approx(50.0)
    # (54.0325 - 4.065) / 49.935 = 100.0651 %
    uncapped = mean_capped_human_normalized_score(returns, cap=1000.0)
    assert uncapped == pytest.approx((100.06508461 + 50) / 3)


@pytest.mark.parametrize("returns", [{}, {"rooms_watermaze": []}])
def test_no_mean_of_nothing(returns):
    with pytest.raises(ValueError, match=r"score|return"):
        mean_capped_human_normalized_score(returns)


def test_only_variants_for_evaluation_need_leave():
    needing = [
        name
        for level in DMLAB30.values()
        for name in {level.name, level.test_name}
        if dmlab_levels.needs_hold_out_levels(name)
    ]
    assert sorted(needing) == [
        "rooms_collect_good_objects_test",
        "rooms_exploit_deferred_effects_test",
    ]
