"""Tests of the output and the refusals of ``ddlf plan``, without workers."""

import dataclasses
import re
import shlex
import sys
from types import SimpleNamespace

import pytest

from ddlf.cli.main import main
from ddlf.cli.options import RUN as RUN_COMMAND
from ddlf.cli.results import on_terminal
from ddlf.errors import ConfigError
from ddlf.extras.planner.choice import Choice, Wish
from ddlf.extras.planner.command import PLAN as PLANNER
from ddlf.extras.planner.command import longer_command, run_command
from ddlf.extras.planner.memory import Bytes, Largest, MemoryModel, Peak, Peaks
from ddlf.extras.planner.model import Link, Measured, Predicted, Setting, TimeModel, Way
from ddlf.extras.planner.result import Plan, lines
from ddlf.extras.planner.units import bandwidth, budget_of, latency

RUN = "ddlf run app.py"


def choice(slots, factor, seconds, way, *, within=True):
    epoch = Predicted(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds, within=within)
    setting = Setting(way=way, slots=slots, batch=64, steps=10)
    return Choice(
        setting=setting, epoch=epoch, update_s=seconds / 50, factor=factor, low=0.9 * factor, high=1.1 * factor
    )


BEST = choice(6, 4.1, 1.9, Way("sync", "star", "int8"))
NOW = choice(8, 3.4, 2.3, Way("sync", "star", "float32"))
FAR = choice(16, 2.0, 4.0, Way("async", "star", "float32"), within=False)
PLAN = Plan(
    measured=(),
    model=TimeModel([Measured(setting=NOW.setting, seconds=(1.0,))]),
    spent_s=38.0,
    workers=8,
    samples=60_000,
    now=NOW,
    best=BEST,
    fit=Predicted(seconds=7.8, low=7.0, high=8.6),
    choices=(BEST, NOW, FAR),
    step_s=0.00849,
    exchange_s=0.0683,
)


def parsed(*words):
    return PLANNER.parser("ddlf plan").parse_args(["my app.py", *words])


@pytest.mark.parametrize(
    ("words", "way", "run"),
    [
        ((), Way("sync", "star", "int8"), "--slots 6 --batch-size 64 --codec int8"),
        (
            ("--local", "2", "-p", "n=1000", "--batch-size", "16", "--budget", "30s", "-q", "--no-dashboard"),
            Way("async", "star", "float32"),
            "--local 2 --slots 6 --batch-size 64 --mode async -p n=1000",
        ),
        (
            ("-c", "other cluster.yaml", "--codec", "int8", "--deterministic", "-p", "slots=3"),
            Way("sync", "star", "float32"),
            "--deterministic -c 'other cluster.yaml' --slots 6 --batch-size 64 --codec float32",
        ),
        (
            ("--listen", "[::1]:9000", "--workers", "2..4", "--wait", "--seed", "0", "-p", "text=a b"),
            Way("sync", "star", "float32"),
            "--seed 0 --listen '[::1]:9000' --workers 2..4 --wait --slots 6 --batch-size 64 -p 'text=a b'",
        ),
        (
            ("--local", "2", "--gpus", "0,1", "--gpu-memory", "8GB"),
            Way("sync", "star", "float32"),
            "--local 2 --gpus 0,1 --gpu-memory 8GB --slots 6 --batch-size 64",
        ),
        (
            ("--hosts", "a:9000,b:9000", "--token-file", "t", "--insecure-plaintext", "--target", "App"),
            Way("sync", "star", "float32"),
            "--hosts a:9000,b:9000 --token-file t --insecure-plaintext --target App --slots 6 --batch-size 64",
        ),
    ],
)
def test_the_printed_command_has_the_options_of_the_call_that_change_a_run(words, way, run):
    plan, options = dataclasses.replace(PLAN, best=choice(6, 4.1, 1.9, way)), parsed(*words)
    assert run_command(plan, options) == f"ddlf run 'my app.py' {run}"
    again = RUN_COMMAND.parser("ddlf run").parse_args(shlex.split(run_command(plan, options))[2:])
    for name in ("config", "local", "hosts", "listen", "workers", "wait", "gpus", "gpu_memory", "seed", "target"):
        assert getattr(again, name) == getattr(options, name)


def test_the_printed_command_names_a_usual_value_if_the_app_has_another_one():
    plan = dataclasses.replace(PLAN, best=choice(6, 4.1, 1.9, NOW.setting.way), now=FAR)
    assert run_command(plan, parsed()) == "ddlf run 'my app.py' --slots 6 --batch-size 64 --mode sync"


def test_a_plan_is_a_table_a_verdict_and_a_command():
    assert lines(PLAN, RUN) == [
        "measured  0 settings in 38 s: a step takes 8.49 ms, an exchange 68.3 ms; fit on one machine takes 7.8 s an epoch",
        "          slots  way    batch  codec    s/epoch  s/update  of fit  (80 %)",
        "best          6  sync      64  int8         1.9     0.038   4.10x  (3.69-4.51)",
        "now           8  sync      64  float32      2.3     0.046   3.40x  (3.06-3.74)",
        "             16  async     64  float32        4      0.08   2.00x  (1.80-2.20) not measured",
        "training  1 epoch takes 1.9 s (1.71-2.09); fit on one machine needs 7.8",
        "pays off: 6 slots are 4.10 times as fast as fit on one machine (3.69 to 4.51).",
        "run       ddlf run app.py",
    ]


WIDE = dataclasses.replace(
    PLAN,
    memory=MemoryModel(
        Peaks(
            worker=1,
            samples=60_000,
            framework=300_000_000,
            data=200_000_000,
            loaded=0,
            weights=1_000_000,
            optimizer=0,
            batches=(Peak(batch=64, most=900_000_000), Peak(batch=128, most=1_000_000_000)),
        )
    ),
    choices=tuple(
        dataclasses.replace(
            choice(16, 2.0, 1234.0, way, within=way.mode == "sync"), memory=Bytes(count=9e8, low=9e8, high=1e9)
        )
        for way in (Way("sync", "gradient", "float32"), Way("async", "star", "float32"))
    ),
    **{
        name: dataclasses.replace(option, memory=Bytes(count=9e8, low=9e8, high=1e9))
        for name, option in (("best", BEST), ("now", NOW))
    },
)


@pytest.mark.parametrize(
    ("width", "head", "left_out"),
    [
        (120, "slots  way             batch  codec    s/epoch  s/update  memory  of fit  (80 %)", ""),
        (80, "slots way            codec   s/epoch of fit (80 %)", "s/update, memory, batch"),
        (60, "slots way            codec   s/epoch of fit", "s/update, memory, batch, (80 %)"),
    ],
)
def test_the_table_fits_the_terminal_and_says_what_it_leaves_out(width, head, left_out):
    printed = lines(WIDE, RUN, width=width)
    first = next(index for index, line in enumerate(printed) if " slots" in line and " way " in line)
    rows = printed[first : first + 5]
    assert rows[0] == f"          {head}"
    assert max(map(len, rows)) <= width
    marked = [row for row in rows[1:] if row.endswith(" not measured" if width > 60 else "x ?")]
    assert [row.split()[1] for row in marked] == ["async"]
    notes = [line for line in printed if line.startswith("left out  ")]
    mark = "; ? means not measured" if width == 60 else ""
    assert notes == ([f"left out  {left_out}, because the terminal is narrow{mark}"] if left_out else [])


def test_a_batch_size_that_differs_stays_in_a_narrow_table():
    other = dataclasses.replace(WIDE.choices[0], setting=dataclasses.replace(WIDE.choices[0].setting, batch=2000))
    printed = lines(dataclasses.replace(WIDE, choices=(*WIDE.choices, other)), RUN, width=60)
    rows = [line for line in printed if line[10:15].strip().isdigit() or " way " in line]
    assert " batch " in rows[0]
    assert max(map(len, rows)) <= 60
    assert "left out  s/update, memory, (80 %), because" in "\n".join(printed)


def test_only_other_lines_are_wrapped_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    run = f"{RUN} {'--option value ' * 9}".rstrip()
    printed = on_terminal(lines(WIDE, run, width=60)).split("\n")
    assert printed[-1] == f"run       {run}"  # to copy
    assert max(map(len, printed[:-1])) <= 60


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (
            0.9,
            "no gain: no setting is faster than fit on one machine by 5 %; the best, 6 slots, is 0.90 times as fast.*\n"
            "fit       train with fit on one machine, which needs no exchange: an epoch takes about 7.8 s there",
        ),
        (1.1, "unclear: 6 slots may be 1.10 times as fast.*\nlonger    ddlf plan app.py --again"),
        (4.1, "pays off: 6 slots are 4.10 times as fast.*\nrun       ddlf run app.py"),
    ],
)
def test_a_verdict_says_what_to_do(factor, verdict):
    best = choice(6, factor, 1.9, BEST.setting.way)
    printed = lines(dataclasses.replace(PLAN, best=best), RUN, "ddlf plan app.py --again")
    assert re.fullmatch(verdict, "\n".join(printed[-2:]))


def test_the_last_line_is_the_choice_that_planned_takes_although_it_may_not_beat_fit():
    slow = choice(8, 0.3, 7.0, NOW.setting.way)
    plan = dataclasses.replace(PLAN, best=choice(6, 1.1, 1.9, BEST.setting.way), now=slow)
    assert plan.verdict == "unclear"
    assert plan.is_taken
    assert lines(plan, RUN, "ddlf plan app.py --again")[-2:] == [
        "unclear: 6 slots may be 1.10 times as fast as fit on one machine (0.99 to 1.21), and are surely faster than your "
        "settings.",
        "run       ddlf run app.py",
    ]
    close = dataclasses.replace(plan, now=choice(8, 1.0, 2.1, NOW.setting.way))
    assert not close.is_taken
    assert lines(close, RUN, "ddlf plan app.py --again")[-1] == "longer    ddlf plan app.py --again"


def test_a_plan_beyond_its_limits_does_not_ask_for_longer_measurements():
    best = choice(6, 1.1, 1.9, BEST.setting.way)
    printed = lines(dataclasses.replace(PLAN, best=best, wish=Wish(deadline_s=0.1)), RUN, "ddlf plan app.py --again")
    assert printed[-2] == "unclear: 6 slots may be 1.10 times as fast as fit on one machine (0.99 to 1.21)."
    assert printed[-1].startswith("help      ")


def test_the_command_that_measures_longer_has_all_options_of_the_call():
    words = ("--local", "2", "-p", "n=5", "--budget", "30s", "--batches", "8,9", "--deadline", "2h", "--goal", "cost")
    more = ("--max-memory", "4GB", "--bandwidth", "100mbit", "--latency", "5ms")
    assert longer_command(parsed(*words, *more)) == (
        "ddlf plan 'my app.py' --local 2 -p n=5 --again --batches 8,9 --goal cost --deadline 2h --max-memory 4GB "
        "--bandwidth 100mbit --latency 5ms --budget 60s"
    )
    assert longer_command(parsed()) == "ddlf plan 'my app.py' --again --budget 120s"


@pytest.mark.parametrize(
    "words",
    [
        ("--max-memory", "1.5GB", "--budget", "1.5m", "--bandwidth", "12MB/s", "--latency", "200us"),
        ("--max-memory", "512MiB", "--budget", "45s", "--bandwidth", "1gbit", "--deadline", "90m"),
        ("--max-memory", "4.7TiB", "--budget", "0.5s", "--bandwidth", "1kbit", "--deadline", "12.5"),
    ],
)
def test_the_command_that_measures_longer_means_what_the_call_meant(words):
    options = parsed(*words)
    again = PLANNER.parser("ddlf plan").parse_args(shlex.split(longer_command(options))[2:])
    for name in ("max_memory", "deadline", "bandwidth", "latency"):
        assert (getattr(again, name) or 0) == pytest.approx(getattr(options, name) or 0, rel=1e-9)
    assert again.budget == 2 * options.budget


@pytest.mark.parametrize("size", ["8GB", "8GiB", "1500MB", "512MiB", "300kB", "2TB", "1025B"])
def test_a_printed_limit_of_cards_is_that_of_the_call(size):
    options = parsed("--local", "2", "--gpu-memory", size)
    assert f"--gpu-memory {size} " in run_command(PLAN, options)


def test_rows_compare_with_fit_with_their_own_batch_size():
    other = choice(6, 3.0, 1.2, NOW.setting.way)
    other = dataclasses.replace(other, setting=dataclasses.replace(other.setting, batch=128))
    plan = dataclasses.replace(PLAN, choices=(other, *PLAN.choices))
    assert lines(plan, RUN)[0].endswith("fit on one machine takes 7.8 s an epoch with batch 64, 3.6 s with 128")


def test_in_a_program_a_plan_is_a_text_and_names_settings():
    assert str(PLAN).splitlines()[:-1] == lines(PLAN)[:-1] == lines(PLAN, RUN)[:-1]
    assert str(PLAN).endswith("\nrun       set slots = 6, codec = 'int8' in the app, and train")
    assert str(dataclasses.replace(PLAN, best=NOW)).endswith("\nrun       train with the present settings")
    shown = []
    PLAN._repr_pretty_(SimpleNamespace(text=shown.append), False)
    assert shown == [str(PLAN)]
    assert repr(PLAN) == (
        "<Plan pays off: --slots 6 --codec int8 is 4.10 times as fast as fit on one machine (3.69 to 4.51)>"
    )


def test_the_whole_training_is_predicted():
    plan = dataclasses.replace(PLAN, wish=Wish(epochs=10))
    assert "training  all 10 epochs take 19 s (17.1-20.9); fit on one machine needs 78" in lines(plan)
    data = plan.to_data()
    assert data["epochs"] == 10
    assert data["training"]["best"]["seconds"] == pytest.approx(19.0)
    assert data["training"]["fit"]["seconds"] == pytest.approx(78.0)


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), True, None, "soon", "0s", "-30s"])
def test_an_invalid_time_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"the time of a plan must be seconds above 0, or a text such as '30s' or '2m'"
    ):
        budget_of(value)


def test_a_time_is_a_number_or_a_text():
    assert [budget_of(value) for value in (1, 2.5, "30s", "2m")] == [1.0, 2.5, 30.0, 120.0]


def test_one_slot_as_the_cheapest_choice_does_not_pay_for_any_interval():
    best = dataclasses.replace(choice(1, 0.81, 9.6, NOW.setting.way), low=0.61, high=1.07)
    plan = dataclasses.replace(PLAN, best=best, wish=Wish(goal="cost"))
    assert plan.to_data()["verdict"] == "no gain"
    assert lines(plan, RUN)[-2] == (
        "no gain: 1 slot is 0.81 times as fast as fit on one machine (0.61 to 1.07); several cost more worker-seconds."
    )


def test_a_very_slow_choice_keeps_its_digits():
    best = choice(2, 0.00341, 2280.0, NOW.setting.way)
    assert "0.0034x  (0.0031-0.0038)" in lines(dataclasses.replace(PLAN, best=best), RUN)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan",), "ddlf plan needs an app; name its file"),
        (("plan", "app.py", "--planned"), "--planned has no effect on ddlf plan, which only measures; leave it out"),
        (
            ("plan", "app.py", "--dry-run", "--save", "m.keras", "--resume", "auto"),
            "--dry-run, --save, --resume have no effect on ddlf plan, which only measures; leave them out",
        ),
        (
            ("plan", "app.py", "--name", "a", "--log", "csv", "--checkpoint-every", "3"),
            "--checkpoint-every, --name, --log have no effect on ddlf plan, which only measures; leave them out",
        ),
        (("plan", "app.py", "--scout"), "--scout has no effect on ddlf plan, which only measures; leave it out"),
        (("scout", "app.py", "--scout"), "--scout has no effect on ddlf scout, which only tries rates; leave it out"),
        (
            ("plan", "--check", "last", "--budget", "9s", "--goal", "time"),
            "--budget, --goal have no effect with --check, which reads a run; leave them out",
        ),
        (("plan", "app.py", "--ui", "json"), "--ui has no effect on ddlf plan, which only measures; leave it out"),
        (("plan", "app.py", "--out", "runs"), "--out has no effect on ddlf plan, which only measures; leave it out"),
        (("plan", "app.py", "--budget", "-5s"), "argument --budget: must not be negative, got '-5s'"),
        (("plan", "app.py", "--latency", "-1ms"), "argument --latency: must not be negative, got '-1ms'"),
        (("plan", "app.py", "--budget"), "argument --budget: expected one argument"),
        (("plan", "app.py", "--budget", "soon"), "must be a duration such as 30s or 2m, got 'soon'"),
        (("plan", "app.py", "--budget", "0"), "must be a duration such as 30s or 2m, got '0'"),
        (
            ("plan", "app.py", "--bandwidth", "0mbit"),
            "must be a bandwidth such as 100mbit, 1gbit or 12MB/s, got '0mbit'",
        ),
        (("plan", "app.py", "--bandwidth", "100"), "must be a bandwidth such as 100mbit, 1gbit or 12MB/s, got '100'"),
        (("plan", "app.py", "--bandwidth", "9furlongs"), "must be a bandwidth such as"),
        (("plan", "app.py", "--latency", "0ms"), "must be a latency such as 5ms or 200us, got '0ms'"),
        (("plan", "app.py", "--latency", "5"), "must be a latency such as 5ms or 200us, got '5'"),
        (("plan", "app.py", "--deadline", "0h"), "must be a duration such as 30s or 2m, got '0h'"),
        (("plan", "app.py", "--goal", "fame"), "must be one of time, cost, memory, got 'fame'"),
        (("plan", "app.py", "--max-memory", "4"), "must be a size such as 512MiB or 4GB, got '4'"),
        (("plan", "app.py", "--max-memory", "4 parsecs"), "must be a size such as 512MiB or 4GB, got '4 parsecs'"),
        (("plan", "app.py", "--max-memory", "0GB"), "must be a size such as 512MiB or 4GB, got '0GB'"),
        (("plan", "app.py", "--batches", "64,x"), "must be batch sizes such as 64,128, got '64,x'"),
    ],
)
def test_wrong_options_are_named(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (bandwidth, "100mbit", 12.5e6),
        (bandwidth, "1 Gbit/s", 125e6),
        (bandwidth, "12.5MB/s", 12.5e6),
        (latency, "5ms", 0.005),
        (latency, "200us", 0.0002),
    ],
)
def test_units_of_networks_are_read(read, text, value):
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("wish", "link", "expected"),
    [
        (Wish(goal="cost"), None, ["cost      11.4 worker-seconds an epoch; fit on one machine needs 7.8"]),
        (
            Wish(epochs=10, deadline_s=60.0),
            None,
            ["deadline  60 s: in time"],
        ),
        (
            Wish(epochs=10, deadline_s=20.0),
            None,
            ["deadline  20 s: not surely in time, and no choice is"],
        ),
        (
            Wish(goal="cost", epochs=10, deadline_s=20.0),
            None,
            ["deadline  20 s: not surely in time, and no choice is"],
        ),
        (
            Wish(epochs=10, deadline_s=10.0),
            None,
            [
                "deadline  10 s: not in time, and no choice is",
                "help      fewer epochs, more or faster workers, another batch size (--batches), or a later deadline",
            ],
        ),
        (
            Wish(),
            Link(bandwidth=12.5e6, latency=0.005),
            ["assumed   100 Mbit/s and 5 ms more each way at the master: this link was not measured"],
        ),
    ],
)
def test_a_goal_and_an_assumed_link_are_printed(wish, link, expected):
    model = TimeModel([Measured(setting=NOW.setting, seconds=(1.0,))], link)
    printed = lines(dataclasses.replace(PLAN, wish=wish, model=model), RUN)
    assert [line for line in printed if line in expected] == expected
    assert all("ddlf run" not in line for line in printed) == printed[-1].startswith("help")


MEMORY = MemoryModel(
    Peaks(
        worker=1,
        samples=60_000,
        framework=300_000_000,
        data=200_000_000,
        loaded=0,
        weights=1_000_000,
        optimizer=0,
        batches=(
            Peak(batch=64, most=582_000_000),
            Peak(batch=128, most=630_000_000, earlier=(64,)),
            Peak(batch=256, most=726_000_000, earlier=(64, 128)),
        ),
        master=640_000_000,
    )
)


@pytest.mark.parametrize(
    ("wish", "largest", "expected"),
    [
        (Wish(), None, []),
        (
            Wish(max_memory=10**9),
            Largest(limit=10**9, batch=700, confirmed=True, failed=(880,)),
            [
                "limit     batch 64 fits into 1.00 GB",
                "largest   batch 700 fits into 1.00 GB of worker 1: a process there trained with it; not 880",
            ],
        ),
        (
            Wish(max_memory=10**8),
            Largest(limit=10**8, batch=0),
            [
                "limit     batch 64 does not fit into 100 MB, and no choice does",
                "largest   no batch was found that fits into 100 MB of worker 1",
            ],
        ),
        (
            Wish(max_memory=600 * 10**6),
            Largest(limit=600 * 10**6, batch=0),
            [
                "limit     batch 64 may not fit into 600 MB, and no choice surely does",
                "largest   no batch was found that fits into 600 MB of worker 1",
            ],
        ),
        (
            Wish(goal="memory"),
            Largest(limit=10**9, batch=700, of_machine=True),
            ["largest   batch 700 fits into 1.00 GB of worker 1: no time was left to confirm it"],
        ),
    ],
)
def test_memory_is_printed_as_a_column_and_lines(wish, largest, expected):
    choices = [dataclasses.replace(option, memory=MEMORY.predict(64)) for option in (BEST, NOW, FAR)]
    plan = dataclasses.replace(
        PLAN, best=choices[0], now=choices[1], choices=tuple(choices), memory=MEMORY, wish=wish, largest=largest
    )
    printed = lines(plan, RUN)
    assert printed[1:3] == [
        "          slots  way    batch  codec    s/epoch  s/update  memory  of fit  (80 %)",
        f"{'nearest' if wish.max_memory == 10**8 else 'best':<10}    6  sync      64  int8         1.9     0.038  582 MB   4.10x"
        "  (3.69-4.51)",
    ]
    needs = "memory    a worker needs 582 MB (519 MB to 653 MB): framework 300 MB, data 200 MB, model 50.0 MB"
    assert printed[5:-3] == [f"{needs}, and 500 kB for a sample of the batch; the master 640 MB", *expected]


@pytest.mark.parametrize(
    ("limit", "largest", "batches", "advice"),
    [
        (10**8, 0, (64,), "allow more memory, because a worker needs 550 MB without any sample of a batch"),
        (515 * 10**6, 16, (64,), "--batch-size 16 fits"),
        (515 * 10**6, 16, (64, 8), "within the limits are --slots 6 --codec int8 --batch-size 8"),
    ],
)
def test_a_limit_that_no_choice_keeps_has_no_command_but_help(limit, largest, batches, advice):
    choices = [
        dataclasses.replace(
            BEST,
            setting=dataclasses.replace(BEST.setting, batch=batch),
            memory=Bytes(count=batch * 10**7, low=low, high=high),
        )
        for batch, low, high in zip(batches, (519 * 10**6, 10**6), (653 * 10**6, 10**7), strict=False)
    ]
    plan = dataclasses.replace(
        PLAN,
        best=choices[0],
        now=choices[0],
        choices=tuple(choices),
        memory=MEMORY,
        wish=Wish(max_memory=limit),
        largest=Largest(limit=limit, batch=largest),
    )
    assert plan.is_beyond
    assert lines(plan, RUN)[-1] == f"help      {advice}"
