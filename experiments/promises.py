"""What the product promises besides the runtime's requirements, which tests hold it, which experiments repeat it.

`mutations.py --docs` writes docs/guarantees.md from this list and from safeguards.py, which has the runtime's promises;
tests/experiments/test_guarantees.py checks that all that is named here exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Experiment:
    """A script that is too slow for the tests.

    Attributes
    ----------
    name : str
        The script's, without its ending.
    question : str
        What it finds out.
    result : str or None
        The file it writes in experiments/results/, whether or not it is there yet; None where it only prints.
    options : str
        With which it is run.
    module : str or None
        The command, where it is a package of several.
    """

    name: str
    question: str
    result: str | None
    options: str = ""
    module: str | None = None

    @property
    def command(self) -> str:
        """How to run it."""
        if self.module is not None:
            return self.module
        out = "" if self.result is None else "--out experiments/results"
        return " ".join(part for part in (f"python experiments/{self.name}.py", self.options, out) if part)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "exactness",
        "Plans against every plan there is, and against the recompute-only optimum",
        "exactness.json",
        "--chains 100 --odd 3000 --rotor 200 --workers 2",
    ),
    Experiment(
        "certificate",
        "The proven gap, the time to a first plan and memory, on chains of 12 to 1000 stages",
        "certificate.json",
    ),
    Experiment(
        "ablation",
        "What each part of the solver adds to plans, bounds and the time to a gap of 1 %",
        "ablation.json",
        "--only unet-14,bart-base,unet-45,heterogeneous-100,encoder-decoder-96,resnet-1001,transformer-98,"
        "resnet-50+disk,heterogeneous-24+disk,homogeneous-12 --budgets 0,10 --seconds 10",
    ),
    Experiment(
        "solvers",
        "On how long chains CP-SAT and SCIP come to a proof, and CP-SAT to the smallest peak from nothing",
        "solvers.json",
    ),
    Experiment(
        "real_profiles",
        "Profiles of ten real models, on which the certificate is measured too",
        None,
        "--out experiments/profiles",
    ),
    Experiment(
        "pooch_questions",
        "The greedy's distance from the optimum, up to what size, and what repeated patterns buy",
        "pooch_questions.json",
        "--only homogeneous-100,resnet-50,unet-14,heterogeneous-48",
    ),
    Experiment(
        "compare_greedy",
        "Steps of the published planners beside ours, on real models",
        "compare_greedy_link_4.json",
        "--models all --link-ratio 4 --budgets 10,30,50 --time-limit 4",
    ),
    Experiment(
        "compare_real",
        "Step and peak beside what PyTorch users have",
        "compare_real.json",
        "--threads 1",
    ),
    Experiment(
        "tight_steps",
        "Real steps at the tightest budgets and equal measured peak, beside greedy and an earlier version",
        "tight_steps.json",
        "--earlier ../earlier",
    ),
    Experiment(
        "planning_time",
        "Seconds of profiling and solving by part, and how they grow with depth",
        "planning_time.json",
        "--before FOLDER",
    ),
    Experiment(
        "undominated",
        "Plans, frontiers, pages and explanations beside published rules: is anything shown beaten in memory and time?",
        "undominated.json",
    ),
    Experiment("predicted_steps", "Predicted step times against measured ones", "predicted_steps.json"),
    Experiment(
        "small_steps",
        "The same in steps of milliseconds, in which copies and the runtime's own code show",
        "small_steps.json",
    ),
    Experiment(
        "overhead",
        "The time that the machinery adds to a step that keeps everything, and to a recomputed block",
        "overhead.json",
        "--rounds 60",
    ),
    Experiment(
        "check_overhead",
        "What comparing costs, with digests and with spots, and in a run of 1,000, on three real models",
        "check_overhead.json",
        "--rounds 9",
    ),
    Experiment(
        "swap_overhead",
        "Swapping's bookkeeping per saved storage, beside a pair of hooks that does nothing",
        "swap_overhead.json",
        "--rounds 80",
    ),
    Experiment("roofline_check", "Times of a roofline against real ones on this machine", None),
    Experiment(
        "estimate_accuracy",
        "Estimated bytes against the allocator's events: 264 peaks of 11 architectures",
        "estimate_accuracy.json",
    ),
    Experiment(
        "estimate_drawn",
        "Estimates, and plans that keep everything, against the allocator's events on 20 model classes drawn by a seed",
        "estimate_drawn.json",
        "--jobs 2",
    ),
    Experiment(
        "folding_drawn",
        "Profiles with layers left out against those of all layers, on 10 model classes drawn by a seed",
        "folding_drawn.json",
        "--time-limit 500",
    ),
    Experiment(
        "trainer_drawn",
        "Training by transformers' Trainer with the callback against without it, on 30 model classes drawn by a seed",
        "trainer_drawn.json",
    ),
    Experiment(
        "planned_drawn",
        "Plans that recompute alone, and with the times of a GPU that isn't here, on 48 model classes drawn by a seed",
        "planned_drawn.json",
        "--jobs 2",
    ),
    Experiment(
        "varying",
        "300 trainings whose steps vary, drawn by a seed from 17 families, in loops, Trainer and Lightning",
        "varying.json",
        "--workers 2",
    ),
    Experiment(
        "rebuilt",
        "Trainings rebuilt from public reports: bits, an end, and steps over the budget without a word",
        "rebuilt.json",
        "--workers 2",
    ),
    Experiment(
        "integrations",
        "Twenty steps in each framework with what its users switch on: bits, budget, what acts, what planning takes",
        "integrations.json",
    ),
    Experiment(
        "many_ranks",
        "Replicated and sharded models on two and four ranks: bits, one plan, each rank's budget, what acts, gathers",
        "many_ranks.json",
    ),
    Experiment(
        "rank_faults",
        "Groups of two and four ranks of which one fails, is killed, or has less memory or another model than others",
        "rank_faults.json",
    ),
    Experiment(
        "pages",
        "Size of the pages of plans for 12, 100 and 1000 stages, and the time to make and to open them",
        "pages.json",
    ),
    Experiment(
        "sharded_large",
        "Whether Llama 3 70B can be fine-tuned on 8, 16 and 32 H100s, as the command line answers",
        "sharded_large.json",
    ),
    Experiment(
        "estimate_large",
        "Time and memory that estimates of models of 8 and 70 billion parameters take",
        "estimate_large.json",
    ),
    Experiment(
        "snapshots",
        "Recorded histories of real devices, named by `$CKPTPLAN_HISTORIES`, through `ckptplan snapshot`",
        "snapshots.json",
    ),
    Experiment("published", "Estimates beside figures that others measured and published", "published.json"),
    Experiment("fit_jobs", "Jobs of `ckptplan fit` and `estimate` beside bytes worked out by hand", "fit_jobs.json"),
    Experiment(
        "bitwise",
        "Losses, gradients and buffers against plain training, bit for bit, in 19 architectures",
        "bitwise.json",
    ),
    Experiment(
        "odd_models",
        "Odd but legal models and loops under every forced decision: equal, refused, an error, or silently wrong",
        "odd_models.json",
    ),
    Experiment(
        "odd_random",
        "1000 random models and loops that combine odd state, arguments and hooks, under every decision and mixtures",
        "odd_random.json",
        "--processes 2",
    ),
    Experiment(
        "accumulation",
        "Budgets of plans for steps that start with gradients: 36 trainings of three models in three loops, measured",
        "accumulation.json",
    ),
    Experiment(
        "streams",
        "Models on several streams, planned, on an emulated device: bits, and what notices that a wait is missing",
        "streams.json",
        "--seeds 1000 --without 16",
    ),
    Experiment("faults", "1500 injected faults, each followed by a clean step", "faults.json", "--faults 1500"),
    Experiment(
        "soak", "Memory, threads and files over thousands of steps of random shapes", "soak.json", "--steps 2000"
    ),
    Experiment(
        "gpu",
        "Plans and rivals at equal reserved peaks, bits, overlap, memory histories on a GPU (docs/gpu.md)",
        "gpu/h200.json",
        module="python -m experiments.gpu all --out RUN --json experiments/results/gpu/h200.json",
    ),
    Experiment(
        "size",
        "Lines of code, parameters, numbers and import times, beside those of another commit",
        "size.json",
        "--commit 3892eb31 --rounds 5",
    ),
    Experiment("walks", "Which functions a budget, a saved tensor and a stage's bytes pass", None),
    Experiment("mutations", "Each of the runtime's safeguards taken out: does a test fail?", "mutations.json"),
    Experiment(
        "mutations",
        "Those against wrong values taken out: do the checks while training find it, in the first wrong step?",
        "digest.json",
        "--digest",
    ),
    Experiment(
        "mutants",
        "120 random changes of solving, referee, core, profiling, memory and cli: does a test fail?",
        "mutants.json",
    ),
)


@dataclass(frozen=True, slots=True)
class Promise:
    """Something a user may rely on.

    Attributes
    ----------
    area : str
        One of AREAS.
    what : str
        The promise.
    tests : tuple of str
        That hold it, as "file::function" in tests/.
    experiments : tuple of str
        Names in EXPERIMENTS of those that repeat it at scale.
    contracts : tuple of str
        Contracts of import-linter in pyproject.toml that hold it.
    """

    area: str
    what: str
    tests: tuple[str, ...]
    experiments: tuple[str, ...] = ()
    contracts: tuple[str, ...] = ()


AREAS = (
    "Solving",
    "The referee and the published planners",
    "Profiles, plans and their files",
    "Profiling",
    "Estimates of memory",
    "Many devices",
    "Reports",
    "Command line",
    "Training frameworks",
    "What is measured",
)
PURE = "Planning is pure: no torch in core, solving, baselines, referee, report and what plans a profile"
ONE_WAY = "Imports go one way; runtime, solving, baselines and referee don't know each other"


TESTS = Path(__file__).parent.parent / "tests"


def _in(file: str, *tests: str) -> tuple[str, ...]:
    """Tests of the one file of that name, in whichever folder of `tests` it lies."""
    (found,) = TESTS.rglob(f"{file}.py")
    return tuple(f"{found.relative_to(TESTS).as_posix()}::{test}" for test in tests)


PROMISES: tuple[Promise, ...] = (
    # Solving
    Promise(
        "Solving",
        "On small chains a plan is the fastest of all plans there are, with a disk of those that fill the host first",
        _in(
            "test_solver",
            "test_equals_brute_force",
            "test_no_other_points_are_faster",
            "test_small_chains_are_solved_by_the_exact_search_alone",
        )
        + _in("test_tiers", "test_equals_brute_force", "test_the_host_is_filled_in_the_order_of_the_stages")
        + _in(
            "test_points",
            "test_parts_and_orders_are_found",
            "test_a_real_models_plan_is_as_fast_as_any",
            "test_no_plan_is_faster_than_one_called_optimal",
            "test_the_fastest_moves_are_those_of_brute_force",
            "test_changes_never_make_a_step_longer_and_their_costs_are_the_referees",
        ),
        ("exactness", "mutants"),
    ),
    Promise(
        "Solving",
        "With recompute alone no plan is slower than the optimum of the published dynamic program",
        _in(
            "test_solver",
            "test_recompute_only_is_never_slower_than_rotor",
            "test_segment_dp_is_the_optimum_on_textbook_chains",
        ),
        ("exactness",),
    ),
    Promise(
        "Solving",
        "The searches for long chains find sound plans, and on small chains nearly always the fastest",
        _in(
            "test_solver",
            "test_label_dp_finds_the_optimum_of_most_small_chains",
            "test_local_search_never_gets_worse_and_stays_in_the_space",
            "test_the_way_for_long_chains_is_sound_on_short_ones",
        )
        + _in("test_tiers", "test_the_way_for_long_chains_is_sound_on_short_ones"),
        ("exactness", "certificate"),
    ),
    Promise(
        "Solving",
        "A search ends at the gap that is asked for, and hands out the plans that it finds on the way",
        _in(
            "test_solver",
            "test_the_search_ends_at_the_gap_that_is_asked_for",
            "test_a_bound_that_is_enough_ends_its_search",
            "test_plans_are_handed_out_as_they_are_found",
        )
        + _in("test_frontier", "test_plans_of_a_frontier_are_handed_out"),
    ),
    Promise(
        "Solving",
        "No bound is above the optimum, so no plan is further from it than the gap printed beside it",
        _in(
            "test_bounds",
            "test_never_above_the_optimum_of_small_chains",
            "test_never_above_any_plan_of_longer_chains",
            "test_a_smaller_space_has_no_smaller_bound",
        )
        + _in("test_tiers", "test_equals_brute_force")
        + _in(
            "test_mixed_integer",
            "test_never_above_the_optimum_and_mostly_equal",
            "test_bounds_and_plans_of_a_process_of_its_own",
            "test_whole_numbers_only_relax",
            "test_a_plan_that_does_not_fit_in_the_time_of_a_known_one_is_no_bound",
            "test_the_smallest_peak_in_whole_bytes_is_never_above_the_truth_and_mostly_equal",
            "test_it_is_used_where_the_linear_bound_leaves_a_gap",
        ),
        ("exactness", "certificate"),
    ),
    Promise(
        "Solving",
        "Long chains have a plan from the start, and end with a small proven gap within the time limit",
        _in(
            "test_solver",
            "test_a_long_chain_has_a_plan_from_the_start",
            "test_longer_chains_are_sound",
            "test_the_time_limit_ends_the_search",
            "test_homogeneous_blocks_come_within_a_percent",
        )
        + _in("test_tiers", "test_longer_chains_are_sound"),
        ("certificate", "pooch_questions"),
    ),
    Promise(
        "Solving",
        "Where no plan fits, the error names the smallest budget that works and the stage that binds",
        _in(
            "test_solver",
            "test_smallest_peak_and_the_error_below_it",
            "test_error_of_a_long_chain_says_whether_the_peak_is_proven",
            "test_no_plan_is_below_the_peak_bounds",
            "test_the_update_can_bind",
        )
        + _in("test_mixed_integer", "test_the_smallest_peak_in_whole_bytes_is_never_above_the_truth_and_mostly_equal")
        + _in("test_profile", "test_the_error_for_too_small_a_budget_names_one_that_works"),
        ("exactness", "solvers"),
    ),
    Promise(
        "Solving",
        "The same call gives the same plan",
        _in("test_solver", "test_same_seed_same_plan") + _in("test_bounds", "test_equal_calls_give_equal_answers"),
    ),
    Promise(
        "Solving",
        "A larger budget is never slower, and no option is used that gains nothing",
        _in(
            "test_solver",
            "test_makespan_never_rises_with_the_budget",
            "test_everything_kept_when_it_fits",
            "test_options_that_gain_nothing_do_not_appear_without_need",
        )
        + _in("test_tiers", "test_a_disk_makes_no_plan_slower", "test_no_disk_where_the_host_has_room"),
    ),
    Promise(
        "Solving",
        "A step takes no less than the host takes to launch it, in plans, bounds and proofs of optimality",
        _in(
            "test_launching",
            "test_recompute_is_launched_and_a_swap_is_not",
            "test_equals_brute_force",
            "test_the_way_for_long_chains_is_sound_on_short_ones",
            "test_the_linear_program_bounds_both_sums_together",
            "test_the_smallest_peak_within_a_slowdown_counts_launching",
        )
        + _in("test_saved", "test_a_plan_whose_step_left_out_the_host_is_read_with_it"),
        ("exactness",),
    ),
    Promise(
        "Solving",
        "Limits of host and disk memory are kept",
        _in("test_solver", "test_host_limit", "test_no_room_on_the_host_tier_means_nothing_moves")
        + _in("test_tiers", "test_staging_buffers_count_against_the_host", "test_limits_that_cannot_be_used"),
    ),
    Promise(
        "Solving",
        "The frontier runs from the smallest peak to everything kept; a slowdown in place of a budget is kept",
        _in(
            "test_frontier",
            "test_frontier_runs_from_the_smallest_peak_to_everything_kept",
            "test_smallest_peak_within_a_slowdown",
            "test_more_slowdown_never_needs_more_memory",
            "test_referee_agrees_with_the_slowdown",
        ),
    ),
    Promise(
        "Solving",
        "No plan is beaten in memory and time by a quick published rule within its peak, and no point of a frontier or "
        "page by another one that is shown; no alternative that fits is as fast as the plan that is explained",
        _in(
            "test_unbeaten",
            "test_no_rule_beats_a_plan",
            "test_no_alternative_beats_the_plan_that_is_explained",
            "test_no_rule_beats_a_frontier",
            "test_a_page_shows_no_beaten_point",
        ),
        ("undominated",),
    ),
    Promise(
        "Solving",
        "A search that runs out of time leaves sound bounds and plans, and progress is reported until then",
        _in(
            "test_bounds",
            "test_a_deadline_that_has_passed_leaves_the_baseline",
        )
        + _in(
            "test_mixed_integer",
            "test_no_time_and_a_failing_process_are_no_bound",
            "test_a_process_that_is_late_is_ended",
            "test_no_time_is_no_bound_on_the_smallest_peak",
        )
        + _in("test_solver", "test_progress_is_reported"),
    ),
    # Referee
    Promise(
        "The referee and the published planners",
        "The referee replays plans by its own code, which shares none with the solver",
        _in(
            "test_referee",
            "test_keep_all",
            "test_recompute_all",
            "test_swap_hides_behind_compute",
            "test_segment_of_three",
            "test_nested_segment",
            "test_selective_option",
            "test_agrees_with_core_on_random_plans",
            "test_a_thousand_stages_are_replayed_at_once",
        )
        + _in("test_solver", "test_evaluator_equals_residency_and_referee")
        + _in("test_tiers", "test_evaluator_equals_referee"),
        ("exactness", "mutants"),
        (ONE_WAY,),
    ),
    Promise(
        "The referee and the published planners",
        "Each rule that a plan breaks is named, with its stage",
        _in(
            "test_referee",
            "test_broken_plans_are_named",
            "test_budgets_are_exact",
            "test_an_option_the_stage_lacks",
            "test_a_segment_needs_stages_that_recompute",
            "test_a_storage_that_is_to_stay",
        )
        + _in("test_tiers", "test_violations_of_tiers", "test_other_placements_are_valid_and_start_a_search"),
    ),
    Promise(
        "The referee and the published planners",
        "Every plan of every published planner passes the referee, and says where the rule is from",
        _in(
            "test_baselines",
            "test_every_plan_passes_the_referee",
            "test_every_baseline_says_what_it_is_from",
            "test_times_and_peak_equal_the_referee_and_waits_add_up",
            "test_smallest_peak_named_is_feasible_and_one_byte_less_is_not",
        ),
        ("compare_greedy",),
    ),
    Promise(
        "The referee and the published planners",
        "The published planners do what their papers say",
        _in(
            "test_baselines",
            "test_rotor_equals_brute_force",
            "test_pofo_swaps_and_is_never_slower_than_rotor",
            "test_pooch_lies_between_brute_force_and_swap_all",
            "test_chen_sqrt_keeps_the_last_of_sqrt_segments",
            "test_capuchin_swaps_by_free_time_then_recomputes",
            "test_dtr_evicts_the_stalest",
            "test_nested_constraints_agree_with_a_linear_program",
        ),
    ),
    Promise(
        "The referee and the published planners",
        "The brute force that all are compared with tries every plan",
        _in(
            "test_referee",
            "test_brute_force_tries_every_segment",
            "test_brute_force_knows_the_compute_time_of_what_it_tries",
        ),
    ),
    # Core
    Promise(
        "Profiles, plans and their files",
        "What is written is read back; unknown, missing and wrong fields and other versions are named",
        _in(
            "test_core",
            "test_what_is_written_is_read_back",
            "test_values_of_another_type_are_refused",
            "test_unknown_and_missing_fields_are_named",
            "test_other_schema_versions_are_named",
            "test_files_that_are_neither",
        )
        + _in("test_known_devices", "test_a_description_survives_its_file", "test_impossible_numbers_are_named"),
    ),
    Promise(
        "Profiles, plans and their files",
        "What an earlier version saved loads and runs, or an error names its schema and the remedy",
        _in(
            "test_saved",
            "test_fields_are_read_as_they_were_saved",
            "test_a_saved_plan_fits_its_saved_profile",
            "test_another_schema_is_named_with_the_remedy",
            "test_damaged_files_are_refused",
        )
        + _in("test_verify", "test_a_plan_that_an_earlier_version_saved_is_applied"),
    ),
    Promise(
        "Profiles, plans and their files",
        "The documented examples load and agree with the text beside them; all fields are documented",
        _in(
            "test_cli",
            "test_the_documented_examples_load_and_agree",
            "test_the_documented_fields_are_those_written",
        )
        + _in("test_devices", "test_the_documented_device_loads_and_takes_the_documented_times")
        + _in("test_known_devices", "test_the_documented_fields_of_a_device_are_those_written"),
    ),
    Promise(
        "Profiles, plans and their files",
        "Contradictions and impossible numbers are refused where the data is made",
        _in(
            "test_core",
            "test_no_bytes",
            "test_no_seconds",
            "test_no_bandwidth",
            "test_no_indices",
            "test_contradictions",
            "test_impossible_profiles_and_plans",
        ),
        ("mutants",),
    ),
    Promise(
        "Profiles, plans and their files",
        "A plan for something else is refused with the name of what differs",
        _in(
            "test_runtime",
            "test_the_fingerprint_names_what_differs",
            "test_a_plan_for_another_model",
        )
        + _in("test_referee", "test_a_plan_of_another_chain_is_refused")
        + _in("test_cli", "test_simulate_refuses_the_plan_of_another_profile"),
    ),
    Promise(
        "Profiles, plans and their files",
        "Budgets in GiB round down to whole bytes; what is no size is refused with its unit",
        _in("test_core", "test_budgets_round_down", "test_no_budget")
        + _in("test_cli", "test_a_budget_that_is_no_size_is_refused_with_its_unit"),
    ),
    Promise(
        "Profiles, plans and their files",
        "Planning, replaying and checking a profile need no PyTorch, in Python and on the command line",
        _in(
            "test_without_torch",
            "test_the_package_and_its_help_load_nothing_heavy",
            "test_what_plans_a_profile_works_without_torch",
            "test_commands_that_need_torch_say_so_in_one_line",
            "test_marked_tests_run_without_torch_and_others_are_left_out",
        ),
        ("size",),
        contracts=(PURE,),
    ),
    # Profiling
    Promise(
        "Profiling",
        "A model on CUDA may take inputs from the host, which take none of the device's bytes",
        _in(
            "test_host_inputs",
            "test_lengths_and_numbers_on_the_host_are_no_error",
            "test_they_take_no_bytes_of_the_device",
            "test_bytes_in_host_memory_are_not_the_device_s",
            "test_made_up_operands_lie_where_the_real_ones_do",
        ),
    ),
    Promise(
        "Profiling",
        "Profiling, solving and verifying leave model, gradients and random states as they were, on errors too",
        _in(
            "test_profile",
            "test_profiling_and_solving_change_nothing",
            "test_an_error_inside_the_model_changes_nothing_either",
        )
        + _in("test_attributes", "test_profiling_leaves_attributes_as_they_were")
        + _in("test_usage", "test_profiling_leaves_attributes_alone")
        + _in("test_values", "test_nothing_is_left_changed")
        + _in("test_runtime", "test_verify_changes_nothing")
        + _in("test_gpu", "test_profiling_leaves_no_trace"),
    ),
    Promise(
        "Profiling",
        "Hooks, flags, modes, globals and optimizers are as before whatever runs the model, on every way out",
        _in(
            "test_left_behind",
            "test_profile_leaves_nothing_behind",
            "test_whatever_runs_the_model_leaves_nothing_behind",
            "test_nor_does_what_fails",
            "test_nor_does_an_error_in_any_of_the_forwards",
            "test_globals_caches_and_what_hooks_enclose_have_no_fake_tensors_afterwards",
            "test_optimizers_that_step_in_backward_are_as_before",
            "test_a_trace_puts_back_parameters_that_forward_writes_to",
        )
        + _in("test_surroundings", "test_flags_that_are_put_back_leave_pytorchs_first_choice"),
    ),
    Promise(
        "Profiling",
        "What stages really save and return counts, and a stage that saves other tensors than traced is kept",
        _in(
            "test_real_storages",
            "test_peaks_and_gradients_are_right",
            "test_notes_say_which_stages_and_by_how_much",
            "test_nothing_is_said_of_models_that_are_traced_right",
        ),
    ),
    Promise(
        "Profiling",
        "Predicted peaks are those of the allocator, and a solved plan holds its budget",
        _in(
            "test_profile",
            "test_the_plain_peak_is_predicted",
            "test_forward_peaks_are_predicted_too",
            "test_any_plan_holds_its_predicted_peak_and_gradients",
            "test_a_solved_plan_holds_its_budget_and_gradients",
        )
        + _in("test_models", "test_the_promises_hold")
        + _in("test_runtime", "test_peak_is_as_predicted", "test_predicted_peaks_differ_by_action")
        + _in("test_gpu", "test_peak_is_within_the_budget"),
        ("estimate_accuracy", "compare_real", "gpu"),
    ),
    Promise(
        "Profiling",
        "Gradients that exist when a step starts are planned with, in profile, plan, estimate and verify",
        _in(
            "test_accumulation",
            "test_gradients_count_from_the_start",
            "test_the_peak_of_micro_batches_is_predicted",
            "test_a_training_that_accumulates_keeps_its_budget",
            "test_whether_gradients_exist_is_found",
            "test_an_estimate_starts_with_gradients",
            "test_verify_measures_steps_with_gradients_and_leaves_the_user_s",
        ),
        ("accumulation",),
    ),
    Promise(
        "Profiling",
        "Storages count with their real sizes, and random states of the program's own checkpoints count too",
        _in(
            "test_storages",
            "test_peaks_are_predicted_by_rule",
            "test_peaks_are_predicted_by_what_operations_made_alone",
            "test_rules_give_the_real_sizes",
            "test_checkpoints_inside_stages",
        ),
    ),
    Promise(
        "Profiling",
        "Profiling itself needs less memory than the leanest plan",
        _in("test_profile", "test_profiling_stays_below_the_smallest_feasible_peak")
        + _in("test_values", "test_the_real_run_takes_less_than_the_smallest_plan"),
    ),
    Promise(
        "Profiling",
        "Stages, who holds what and until when, are found as the program has them",
        _in(
            "test_profile",
            "test_stages_are_blocks_and_what_is_worth_it_around_them",
            "test_inputs_are_held_in_the_order_passed_and_linked_to_their_makers",
            "test_skips_are_held_by_the_program_until_their_last_use",
            "test_later_calls_of_a_shared_module_are_stages_of_their_own",
            "test_a_stage_that_writes_to_its_input_is_never_recomputed",
        )
        + _in("test_attributes", "test_stages_that_can_not_run_again_have_no_such_option"),
    ),
    Promise(
        "Profiling",
        "Graphs that forward drops hold what they saved until then, and no plan counts on them in backward",
        _in(
            "test_dropped_graphs",
            "test_plans_keep_their_budgets",
            "test_a_dropped_graph_costs_no_backward_and_can_be_discarded",
            "test_a_few_layers_stand_for_all",
            "test_swapping_alone_leaves_dropped_graphs_alone",
            "test_training_goes_on_without_a_word",
            "test_what_is_detached_may_change_while_training",
        )
        + _in("test_profile", "test_an_output_that_nothing_uses")
        + _in("test_rules", "test_the_worked_example_of_a_dropped_graph"),
    ),
    Promise(
        "Profiling",
        "A stage's options are the exact trade-off of its operations, and hold what they say",
        _in(
            "test_menus",
            "test_the_front_is_that_of_brute_force",
            "test_the_points_offered_follow_the_hull",
            "test_a_menu_saves_exactly_what_its_operations_make",
            "test_an_option_holds_what_it_says",
            "test_peaks_and_gradients_under_any_mixture_of_options",
        ),
        ("bitwise", "planned_drawn"),
    ),
    Promise(
        "Profiling",
        "Layers that repeat are replayed and timed once, and profiles are those of all layers",
        _in(
            "test_folding",
            "test_profiles_are_those_of_all_layers",
            "test_only_four_layers_are_run_with_backward",
            "test_only_four_layers_are_timed",
            "test_layers_with_other_settings_inside_an_object_are_not_equal",
            "test_models_that_read_values_are_run_as_they_are",
        ),
        ("planning_time", "folding_drawn"),
    ),
    Promise(
        "Profiling",
        "A layout that is remembered is that of what the fake kernel returns",
        _in(
            "test_layouts",
            "test_a_kernel_runs_once_per_kind_of_call",
            "test_a_kernel_runs_each_time_if_its_call_does_not_tell_the_result",
            "test_a_traced_model_is_given_what_the_kernels_return",
        ),
    ),
    Promise(
        "Profiling",
        "A plan in a file is taken by a later run of the same request alone, and nothing else is overwritten",
        _in(
            "test_plan_file",
            "test_the_next_run_takes_it",
            "test_another_request_has_another_plan",
            "test_nothing_else_is_overwritten",
            "test_a_function_is_not_told_from_another",
        )
        + _in("test_transformers", "test_a_plan_in_a_file"),
        ("planning_time",),
    ),
    Promise(
        "Profiling",
        "Stages that are alike share replays, with the bytes that replays of their own give",
        _in("test_folding", "test_stages_that_are_alike_share_replays"),
    ),
    Promise(
        "Profiling",
        "Models that read values to decide what to run are planned for the path of their batch",
        _in(
            "test_values",
            "test_the_promises_hold",
            "test_estimates_hold_too",
            "test_what_a_real_run_writes_to_comes_back",
            "test_without_values_there_is_a_clear_error",
        ),
    ),
    Promise(
        "Profiling",
        "Models compiled stage by stage are planned and run; those compiled as a whole are refused",
        _in(
            "test_compile",
            "test_every_action_on_compiled_stages",
            "test_inductor",
            "test_everything_is_as_before",
            "test_a_model_compiled_as_a_whole_is_refused",
        ),
    ),
    Promise(
        "Profiling",
        "Times of devices that aren't here follow documented rules and lie within the device's bounds",
        _in(
            "test_devices",
            "test_a_product_is_bound_by_operations_or_by_memory",
            "test_no_operation_of_a_model_is_faster_than_its_bounds",
            "test_calibration_measures_this_machine",
            "test_calibration_leaves_the_program_as_it_was",
        )
        + _in("test_known_devices", "test_every_number_of_a_known_device_has_a_source"),
        ("roofline_check",),
    ),
    # Memory
    Promise(
        "Estimates of memory",
        "Every phase of a step is estimated as the allocator counts it",
        _in(
            "test_estimate",
            "test_every_phase_is_what_the_allocator_counts",
            "test_every_optimizer_s_state_and_temporaries",
            "test_plans",
            "test_gradients_that_stay",
            "test_autocast_and_its_cache_of_cast_weights",
            "test_accumulation_adds_to_gradients_that_are_there",
            "test_categories_add_up_in_every_phase",
        )
        + _in("test_measure_phases", "test_every_phase_of_an_mlp_with_momentum", "test_measuring_twice_gives_the_same"),
        ("estimate_accuracy", "estimate_drawn", "mutants"),
    ),
    Promise(
        "Estimates of memory",
        "Optimizers count as they are, with state of all kinds and places, and tracing leaves them as before",
        _in(
            "test_optimizers",
            "test_pytorchs_optimizers",
            "test_state_of_all_kinds_and_places",
            "test_state_in_tensors_of_another_class",
            "test_a_part_of_the_state",
            "test_the_bytes_of_rebinding_by_hand",
            "test_the_optimizer_is_as_before",
        ),
    ),
    Promise(
        "Estimates of memory",
        "Jobs named by trainers' files are counted as their packages lay them out, or refused by name",
        _in("test_optimizers", "test_state_of_named_optimizers", "test_every_name_of_a_trainer_is_counted_or_refused")
        + _in(
            "test_configs",
            "test_axolotls_rules",
            "test_what_axolotls_files_may_not_say",
            "test_the_type_of_the_weights",
            "test_the_layout_of_4_bits",
            "test_the_layout_of_8_bits",
            "test_a_quantized_layer_saves_and_makes_what_a_full_one_does_not",
            "test_sharded_models_of_files",
        ),
        ("fit_jobs",),
    ),
    Promise(
        "Estimates of memory",
        "What a loop holds of output, loss and batch counts as long as it is held, and is named",
        _in("test_loops", "test_what_a_loop_holds", "test_micro_batches_are_kept_as_well", "test_the_loop_is_named"),
    ),
    Promise(
        "Estimates of memory",
        "Batches in turn are estimated step by step as the allocator counts them, with what it reserves between them",
        _in(
            "test_batches",
            "test_a_sorted_epoch_of_packed_documents",
            "test_what_an_epoch_reserves_counted_by_hand",
            "test_micro_batches_of_different_lengths",
            "test_batches_that_take_other_paths",
            "test_batches_of_one_shape_are_recorded_once_unless_values_are_read",
            "test_more_than_two_updates",
            "test_a_plan_for_the_largest_batch",
            "test_a_list_of_one_is_that_batch",
        ),
    ),
    Promise(
        "Estimates of memory",
        "Estimates agree with the formulas and figures of the literature",
        _in(
            "test_formulas",
            "test_transformer_layer_without_flash_attention_saves_s_b_h_34_plus_5_a_s_over_h",
            "test_full_recompute_holds_2_s_b_h",
            "test_bytes_a_parameter_at_rest",
            "test_ddp_holds_one_more_copy_of_the_gradients_unless_they_are_views_of_its_buckets",
        ),
        ("published",),
    ),
    Promise(
        "Estimates of memory",
        "The caching allocator's rules are PyTorch's, in every state it can get into",
        _in(
            "test_allocator",
            "test_best_fit_then_lowest_address",
            "test_free_merges_with_free_neighbours",
            "test_several_oversize_blocks_are_released_largest_first",
            "test_garbage_collection_releases_the_older_half",
            "test_expandable_segments_grow_by_pages",
            "test_out_of_memory_says_what_and_how_to_help",
            "test_state_is_sound_after_every_call",
            "test_a_plain_list_search_does_the_same",
        )
        + _in(
            "test_histories",
            "test_a_history_of_a_real_device_replays_exactly",
            "test_a_generated_history_replays_exactly",
            "test_a_difference_is_found_where_it_is",
        )
        + _in("test_allocator_gpu", "test_replay_of_recorded_history"),
        ("snapshots", "gpu"),
    ),
    Promise(
        "Estimates of memory",
        "A recorded history says whose fragments are and what other settings would reserve; its file does no harm",
        _in(
            "test_snapshot",
            "test_a_start_is_what_undoing_leaves",
            "test_whose_the_fragments_are",
            "test_what_other_settings_would_have_reserved",
            "test_a_request_that_failed_and_what_would_have_held_it",
            "test_snapshot_files_hold_plain_data",
            "test_no_more_is_read_than_fits",
            "test_entries_that_no_recording_makes",
        ),
        ("snapshots",),
    ),
    Promise(
        "Estimates of memory",
        "Repeated layers are recorded once, and written out exactly as the full record has them",
        _in(
            "test_estimate",
            "test_repeated_layers_are_written_out_exactly",
            "test_the_number_of_operations_recorded_does_not_grow_with_depth",
            "test_layers_that_differ_are_not_folded",
            "test_a_forward_may_treat_a_layer_specially",
        ),
        ("estimate_large",),
    ),
    Promise(
        "Estimates of memory",
        "The device need not be here, nor the model have memory; what is reserved counts on CUDA",
        _in(
            "test_estimate",
            "test_a_device_that_is_not_here_and_a_model_without_memory",
            "test_cuda_chooses_other_operations",
            "test_the_reserved_peak_is_what_solve_compares_with_the_budget",
            "test_a_plan_for_another_device_is_checked_on_arrival",
        )
        + _in("test_measured_peaks", "test_predicted_peaks_are_those_of_the_device")
        + _in("test_fresh_state", "test_once_when_state_is_made", "test_the_prediction_is_what_training_reserves")
        + _in("test_job", "test_what_smaller_fragments_leave_unused_is_used")
        + _in(
            "test_away_longest",
            "test_as_fast_and_as_small",
            "test_a_plan_that_fits_with_its_points_moved_needs_no_smaller_budget",
        ),
        ("published", "gpu"),
    ),
    Promise(
        "Estimates of memory",
        "An estimate changes nothing and leaves nothing behind",
        _in("test_estimate", "test_nothing_is_changed", "test_nothing_is_left_behind", "test_two_threads_at_once"),
    ),
    Promise(
        "Estimates of memory",
        "The largest batch fits, the next one was tried and doesn't",
        _in(
            "test_fit",
            "test_the_search_ends_between_a_batch_that_fits_and_the_next",
            "test_kept_is_the_largest_by_brute_force",
            "test_a_plan_lets_more_in_and_is_measured",
            "test_survey_agrees_with_estimates_and_plans",
        )
        + _in("test_job", "test_no_plan_is_returned_whose_replay_exceeds_the_budget"),
    ),
    Promise(
        "Estimates of memory",
        "What distributed training adds is counted, and plans work on sharded and replicated models",
        _in("test_estimate", "test_ddp_buckets", "test_ddp_fills_its_buckets_in_reverse")
        + _in(
            "test_sharded",
            "test_a_sharded_model",
            "test_gathers",
            "test_data_parallel",
            "test_distributed_checkpoints",
            "test_what_is_not_planned",
            "test_plans_of_sharded_models",
            "test_a_sharded_model_that_reads_values",
        )
        + _in(
            "test_sharded_ranks",
            "test_the_same_bits_within_the_budget",
            "test_a_plan_may_be_made_before_the_model_is_sharded",
            "test_after_a_restart_with_other_ranks_a_plan_is_made_again",
            "test_gradients_that_stay_whole_need_a_plan_with_them",
            "test_units_are_modules_with_parameters_of_their_own",
            "test_a_unit_with_a_parameter_of_others_is_refused",
            "test_settings_in_a_text",
        )
        + _in(
            "test_collectives",
            "test_a_ring_sends_all_but_its_own_part",
            "test_compute_hides_collectives_that_are_shorter",
            "test_longer_ones_are_what_the_step_waits_for",
            "test_replicas_and_what_stays_whole",
            "test_bad_rates_are_refused",
        )
        + _in(
            "test_replicated",
            "test_the_same_bits_within_the_budget",
            "test_plans_go_on_either_side_of_the_wrapper",
            "test_what_makes_tensors_of_its_own_is_refused",
        ),
        ("many_ranks", "sharded_large"),
    ),
    Promise(
        "Many devices",
        "Stages of pipelines train as without a plan, within their budgets with all forwards in flight, by plans with "
        "a proven bound",
        _in("test_pipelines", "test_stages_train_as_without_a_plan_and_within_their_budgets")
        + _in(
            "test_in_flight",
            "test_no_plan_of_a_small_chain_is_faster",
            "test_what_a_step_takes_with_all_in_flight",
            "test_bounds_hold_when_the_time_is_over",
            "test_plans_that_are_handed_out_have_bounds_that_hold",
            "test_more_than_planned_are_noticed",
            "test_what_is_for_one_forward_says_so",
        ),
    ),
    Promise(
        "Many devices",
        "All ranks of a group have one plan, and an error on one is an error on all, soon and by name",
        _in(
            "test_group",
            "test_one_plan_of_the_largest_step_and_the_smallest_budget",
            "test_machines_share_their_host_memory",
            "test_ranks_share_the_main_memory_of_a_machine",
            "test_an_error_on_one_is_an_error_on_all",
            "test_a_budget_that_is_too_small_for_one",
            "test_one_plan_where_no_rank_has_the_largest_inputs",
            "test_ranks_that_do_something_else",
            "test_a_rank_that_ends_in_a_call",
        )
        + _in("test_failing_rank", "test_every_process_ends")
        + _in("test_sharded_ranks", "test_ranks_of_a_sharded_model_plan_for_larger_batches_together")
        + _in("test_ranks_training", "test_trainings_of_two_ranks"),
        ("many_ranks", "rank_faults"),
    ),
    # Reports
    Promise(
        "Reports",
        "What binds, what more memory is worth and the next choices are those that the referee finds",
        _in(
            "test_frontier",
            "test_explanation_adds_up",
            "test_alternatives_are_what_the_referee_finds",
            "test_memory_price_is_what_more_budget_saves",
        ),
    ),
    Promise(
        "Reports",
        "A trace is a step in the trace event format, and its bytes are those of statistics and plan",
        _in(
            "test_trace",
            "test_trace_is_a_step_in_the_trace_event_format",
            "test_bytes_are_those_of_stats_and_verify",
            "test_predicted_memory_is_the_referee_s",
            "test_trace_gives_the_model_back",
        ),
    ),
    Promise(
        "Reports",
        "Tables show every planner, and say what is lacking",
        _in(
            "test_baselines",
            "test_comparison_table_has_a_line_per_planner_and_a_dash_where_nothing_fits",
        )
        + _in("test_tiers", "test_command_line_and_tables")
        + _in("test_runtime", "test_stats_read_well"),
    ),
    Promise(
        "Reports",
        "An out-of-memory error of a planned step says where it was and what helps, and the next step is right",
        _in(
            "test_oom",
            "test_the_note_says_where_it_was",
            "test_behind_the_last_stage_and_in_the_update",
            "test_a_note_is_there_before_the_handle_goes",
            "test_an_error_that_nothing_catches_has_the_note",
        ),
        ("faults",),
    ),
    Promise(
        "Reports",
        "Fragments, rounding and a segment that the allocator wanted are not told as a plan's overrun",
        _in(
            "test_oom",
            "test_what_was_asked_for",
            "test_what_was_asked_for_lies_in_the_range",
            "test_on_cuda_tensors_are_counted",
            "test_the_remedy",
        ),
    ),
    Promise(
        "Reports",
        "Peaks are told by each account of the allocator, the plan's alone; the reserved one has to keep the budget",
        _in(
            "test_verify",
            "test_each_account_has_its_own_peak",
            "test_what_else_the_process_holds_is_told_apart",
            "test_released_blocks_from_before_count_nothing",
            "test_workspaces_of_captured_graphs_are_left_alone",
            "test_profiling_leaves_no_cache",
        )
        + _in("test_stats", "test_peaks_are_those_since_the_plan_was_applied"),
    ),
    # Command line
    Promise(
        "Command line",
        "The page of a plan draws what the referee says, asks for nothing, and runs nothing of a stranger's",
        _in(
            "test_page",
            "test_categories_add_up_to_the_peaks",
            "test_the_page_draws_what_the_referee_says",
            "test_hover_click_and_zoom",
            "test_the_frontier_has_a_slider",
            "test_a_measured_step_is_drawn_over_the_predicted_one",
            "test_a_strangers_profile_runs_nothing",
            "test_the_page_of_an_estimate",
            "test_a_strangers_estimate_runs_nothing",
            "test_what_notebooks_show",
            "test_files_in_the_page_are_the_plan_and_the_profile",
            "test_dark_pages_are_printed_in_dark_on_white",
            "test_a_thousand_stages_fit_in_a_megabyte",
        )
        + _in("test_trace", "test_the_page_of_an_applied_plan"),
        ("pages",),
    ),
    Promise(
        "Command line",
        "Every command has help and an example, and does what its function does",
        _in(
            "test_cli",
            "test_help_names_every_command_and_version_prints",
            "test_each_command_has_an_example",
            "test_solve_writes_a_plan_that_fits_and_simulate_accepts_it",
            "test_frontier_prints_and_saves_its_plans",
            "test_explain_says_what_binds_and_the_next_choices",
            "test_show_prints_stages_and_totals_of_a_profile",
            "test_compare_lists_every_planner",
        )
        + _in("test_cli_models", "test_demo_trains_with_identical_losses_within_its_budget")
        + _in("test_fit", "test_estimate_prints_and_saves", "test_fit_answers_on_one_screen")
        + _in("test_trace", "test_command_line_writes_a_trace"),
        ("mutants",),
    ),
    Promise(
        "Command line",
        "An error is one line with what to do, and exit code 2",
        _in(
            "test_cli",
            "test_a_budget_that_is_too_small_names_the_smallest_that_works",
            "test_unknown_actions_are_named",
            "test_files_that_are_none_of_ours_are_refused",
            "test_a_directory_is_no_output_file",
            "test_solve_wants_a_budget_or_a_slowdown",
        )
        + _in("test_fit", "test_errors_are_one_line"),
    ),
    Promise(
        "Command line",
        "A plan that breaks its promises exits with 1, and the broken rules are named",
        _in("test_cli", "test_simulate_names_what_a_plan_breaks"),
    ),
    # Measured
    Promise(
        "What is measured",
        "Predicted step times are near the measured ones",
        _in("test_stats", "test_each_stage_has_its_own_seconds")
        + _in("test_verify", "test_timed_steps_are_not_metered"),
        ("predicted_steps",),
    ),
    Promise(
        "What is measured",
        "What copies and the runtime's code take from compute is part of an option's time, and of a run in a sweep",
        _in(
            "test_timing",
            "test_options_that_move_take_what_was_measured",
            "test_a_run_in_a_sweep_takes_no_less_than_a_recompute",
            "test_what_runs_in_a_sweep_take_is_measured",
            "test_a_device_is_measured_once",
        )
        + _in(
            "test_overheads",
            "test_an_option_takes_seconds_for_what_it_saves_and_bytes_for_what_it_moves",
            "test_each_run_in_a_sweep_takes_the_overhead_once_more",
        ),
        ("small_steps",),
    ),
    Promise(
        "What is measured",
        "Stages are timed in turn, a profile says its error, and a plan that gains less than that share of what it "
        "changes is given up; no recompute is free",
        _in(
            "test_timing",
            "test_stages_are_timed_in_turn",
            "test_a_measured_profile_says_its_error",
            "test_a_recompute_takes_most_of_what_its_operations_take",
        )
        + _in(
            "test_solver",
            "test_what_gains_no_more_than_the_error_is_given_up",
            "test_a_plan_that_moves_nothing_is_taken_where_it_is_as_fast_within_the_error",
        ),
    ),
    Promise(
        "What is measured",
        "A plan that keeps everything makes a step at most 1 % longer",
        _in("test_stats", "test_only_some_steps_are_measured")
        + _in("test_shapes", "test_a_check_is_cheap_and_keeps_nothing"),
        ("overhead",),
    ),
    Promise(
        "What is measured",
        "Swapping's bookkeeping grows with the storages; waits, events and jobs with the stages that move something",
        _in(
            "test_groups",
            "test_bookkeeping_grows_with_the_storages",
            "test_waits_events_and_jobs_are_as_many_for_fifty_storages_as_for_two",
        ),
        ("swap_overhead",),
    ),
    Promise(
        "What is measured",
        "A recomputed block takes at most 1.2 times as long as with `torch.utils.checkpoint`, its state guarded",
        _in("test_attributes", "test_gradients_are_those_of_plain_steps")
        + _in("test_generators", "test_of_those_not_drawn_from_nothing_is_kept"),
        ("overhead",),
    ),
    Promise(
        "What is measured",
        "Comparing digests in some steps adds at most 1 % to a run of 1,000, spots at most 1 % to a step",
        _in("test_check", "test_sampled_steps", "test_a_checked_step_takes_no_more_memory")
        + _in(
            "test_spots",
            "test_of_a_stage_the_last_tensors_are_compared",
            "test_a_step_with_spots_takes_no_more_memory",
        ),
        ("check_overhead",),
    ),
    Promise(
        "Training frameworks",
        "A training that runs without a plan runs with one: steps that differ are followed, said and planned for",
        _in(
            "test_differences",
            "test_larger_batches",
            "test_masks_that_stages_save_from_some_step_on",
            "test_modules_that_are_called_more_often",
            "test_two_forwards_before_a_backward",
            "test_micro_batches",
            "test_a_forward_without_gradients_beside_one_that_waits",
            "test_layers_that_are_thawed_and_frozen_again",
            "test_training_mode_after_a_plan_made_in_evaluation_mode",
            "test_a_graph_that_is_cut_at_first",
            "test_a_kind_is_warned_of_once_for_each_plan",
        )
        + _in(
            "test_replanning",
            "test_a_step_that_differs_is_planned_for",
            "test_a_batch_without_a_plan_follows_the_former_one",
            "test_a_plan_is_made_on_the_first_training_forward",
            "test_casts_that_two_forwards_share_stay_while_plans_are_made",
        )
        + _in("test_varying", "test_a_drawn_training_breaks_no_promise", "test_a_rebuilt_training_breaks_no_promise")
        + _in("test_transformers", "test_a_longer_batch_without_a_plan_follows_the_former_one")
        + _in("test_lightning", "test_a_larger_batch_without_a_plan_follows_the_former_one"),
        ("varying", "rebuilt"),
    ),
    Promise(
        "Training frameworks",
        "Training with an integration is bitwise that without it and within the budget, and nothing is left behind",
        _in(
            "test_transformers",
            "test_training_is_the_same_and_within_the_budget",
            "test_batches_of_other_lengths",
            "test_saving_and_resuming",
            "test_an_interrupt_leaves_nothing_behind",
            "test_a_loop_that_begins_again_with_a_smaller_batch_is_planned_again",
        )
        + _in(
            "test_lightning",
            "test_training_is_the_same",
            "test_larger_batches_are_planned_for",
            "test_the_plan_is_in_the_checkpoint",
            "test_an_error_leaves_nothing_behind",
        )
        + _in("test_trl", "test_training_is_the_same")
        + _in("test_plain_loops", "test_a_loop_of_accelerate"),
        ("trainer_drawn", "integrations"),
    ),
    Promise(
        "Training frameworks",
        "What an integration can't plan is refused by the setting's name",
        _in(
            "test_transformers",
            "test_what_cannot_be_planned_is_refused_by_name",
            "test_an_engine_that_is_not_known_is_refused_by_name",
        )
        + _in(
            "test_lightning",
            "test_strategies_without_bytes_are_refused",
            "test_optimizers_that_run_the_step_are_refused",
            "test_batches_that_no_plan_can_see_are_refused",
        )
        + _in("test_modes", "test_wrappers_that_plans_can_not_cover_are_refused_by_name"),
    ),
    Promise(
        "What is measured",
        "Plans are held against the published rules, and against PyTorch's own switches at the peak they reach",
        _in("test_baselines", "test_pofo_swaps_and_is_never_slower_than_rotor")
        + _in("test_solver", "test_recompute_only_is_never_slower_than_rotor"),
        ("compare_greedy", "compare_real", "tight_steps", "pooch_questions"),
    ),
)

AT_SCALE: dict[int, tuple[str, ...]] = {
    1: ("gpu",),
    2: ("bitwise", "gpu"),
    3: ("gpu",),
    4: ("bitwise", "streams", "gpu"),
    5: ("bitwise",),
    7: ("faults", "soak"),
    9: ("bitwise",),
    12: ("faults", "soak"),
    14: ("faults",),
    17: ("bitwise", "odd_models", "odd_random"),
    18: ("bitwise", "odd_models", "odd_random"),
    25: ("soak",),
    33: ("accumulation", "odd_random"),
    27: ("faults",),
    29: ("faults",),
    30: ("predicted_steps",),
    31: ("bitwise", "faults"),
    34: ("odd_models", "odd_random", "check_overhead"),
}
"""Which experiments repeat the runtime's requirements, by number, besides `mutations`, which is about all of them."""
