"""The recipe's parts that need no engine: the task, the model's words, the arms, the child process."""

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from samebits import cli
from samebits.errors import SamebitsError
from samebits.evidence import eventlog, provenance
from samebits.recipe import arms, launch, model, process, task, warm_start
from samebits.recipe.warm_start import WarmStart
from samebits.sources.pins import ROOT

DIGITS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


# --- the task


@given(DIGITS)
def test_the_answer_is_the_running_sums(digits: list[int]) -> None:
    said = task.answer(" ".join(map(str, digits)))
    assert [int(x) for x in said.split()] == [sum(digits[: i + 1]) for i in range(len(digits))]


@given(DIGITS)
def test_the_right_answer_alone_earns_one(digits: list[int]) -> None:
    right = task.answer(" ".join(map(str, digits)))
    assert task.compute_score("running_sums", right, right) == 1.0
    assert task.compute_score("running_sums", right + " 7", right) <= 0.5


@given(DIGITS, st.text(max_size=40))
def test_any_other_answer_earns_at_most_half(digits: list[int], said: str) -> None:
    right = task.answer(" ".join(map(str, digits)))
    if said.split() != right.split():
        assert 0.0 <= task.compute_score("running_sums", said, right) <= 0.5


def test_a_seed_gives_the_same_questions_and_another_seed_others() -> None:
    assert task.examples(50, 1) == task.examples(50, 1) != task.examples(50, 2)


# --- the model's words


def test_the_vocabulary_is_exactly_the_models() -> None:
    assert len(model.tokenizer()) == model.config(2, 1024).vocab_size == len(set(model.VOCABULARY)) == 64


@given(st.text(alphabet=[t for t in model.VOCABULARY if len(t) == 1], max_size=40))
def test_text_over_the_vocabulary_round_trips(text: str) -> None:
    tokenizer = model.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_newline_is_one_token() -> None:
    assert len(model.tokenizer().encode("\n", add_special_tokens=False)) == 1


# --- the arms


def test_the_arm_sets_the_switch_and_keeps_what_the_user_set() -> None:
    found = arms.environment(0, {"OMP_NUM_THREADS": "1", "HOME": "/somewhere"})
    assert found[arms.SWITCH] == "0" and found["OMP_NUM_THREADS"] == "1" and found["HOME"] == "/somewhere"


def test_a_switch_that_contradicts_the_arm_is_refused() -> None:
    with pytest.raises(SamebitsError, match="VLLM_BATCH_INVARIANT=1 in the environment contradicts --arm 0: unset it"):
        arms.environment(0, {arms.SWITCH: "1"})


@pytest.mark.parametrize("missing", ["OPERATORS", "ALIGNED_SPEC"])
def test_arm_1_is_refused_where_a_part_of_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, missing: str
) -> None:
    """Asked when a run starts, before its folder or arm 0 of the loop is touched; a plan needs neither."""
    monkeypatch.setattr(
        arms, "OPERATORS", ("samebits", "arms.py") if missing == "OPERATORS" else ("samebits", "cli.py")
    )
    monkeypatch.setattr(arms, "ALIGNED_SPEC", ("samebits", "none.py"))
    for start in (lambda: launch.run_rl(1, 3, tmp_path / "run"), lambda: launch.run_loop(3, tmp_path / "loop")):
        with pytest.raises(SamebitsError, match=r"--arm 1: the samebits installed here has no .*run `make env`, or"):
            start()
    assert list(tmp_path.iterdir()) == [] and launch.plan(1, 3).arm == 1


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "OPERATORS", ("nothing.here", "x.so"))
    with pytest.raises(SamebitsError, match=r"--arm 1: the nothing\.here installed here has no x\.so"):
        arms.contract(1)
    assert arms.contract(0) is None


def test_one_switch_is_all_that_the_arms_differ_by() -> None:
    """The resolved configurations are one, and so are the environments but for the switch."""
    zero, one = launch.plan(0, 3), launch.plan(1, 3)
    assert zero.config_text == one.config_text and zero.model == one.model
    assert set(zero.environment.items()) ^ set(one.environment.items()) == {(arms.SWITCH, "0"), (arms.SWITCH, "1")}


def test_there_is_no_third_arm() -> None:
    with pytest.raises(SamebitsError, match="two arms"):
        arms.environment(2, {})


def test_no_cuda_device_is_seen_on_the_cpu_whatever_the_user_set() -> None:
    """Ray reads an empty list as no slots at all, and refuses the logical one of the recipe."""
    found = arms.environment(0, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found["CUDA_VISIBLE_DEVICES"] == "-1"


def test_model_runner_v2_is_refused_on_the_cpu_and_v1_recorded() -> None:
    with pytest.raises(SamebitsError, match=r"VLLM_USE_V2_MODEL_RUNNER=1 in the environment.*unset it"):
        arms.environment(0, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    found = arms.environment(0, {})
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0" and arms.runner(found) == "v1"


def test_on_cuda_too_one_switch_is_all_that_the_arms_differ_by() -> None:
    zero, one = launch.plan(0, 3, device="cuda"), launch.plan(1, 3, device="cuda")
    assert zero.config_text == one.config_text and zero.model == one.model
    assert set(zero.environment.items()) ^ set(one.environment.items()) == {(arms.SWITCH, "0"), (arms.SWITCH, "1")}
    assert zero.environment["VERL_ENGINE_VENDOR"] == "aligned" and arms.runner(zero.environment) == "v2"
    rollout = zero.config["actor_rollout_ref"]["rollout"]
    assert zero.config["trainer"]["device"] == "cuda" and rollout["free_cache_engine"] and rollout["enable_sleep_mode"]


def test_cuda_sees_the_devices_and_the_runner_that_the_user_named() -> None:
    found = arms.environment(1, {"CUDA_VISIBLE_DEVICES": "3", arms.RUNNER_SWITCH: "0"}, "cuda")
    assert found["CUDA_VISIBLE_DEVICES"] == "3" and arms.runner(found) == "v1"


@pytest.mark.parametrize(("device", "platform"), [("cpu", "nvidia"), ("cuda", "cpu")])
def test_mixed_device_families_are_refused(device: str, platform: str) -> None:
    with pytest.raises(
        SamebitsError, match=rf"VERL_PLATFORM={platform} in the environment contradicts --device {device}"
    ):
        arms.environment(1, {"VERL_PLATFORM": platform}, device)


def test_a_head_that_has_no_rows_on_cuda_is_refused_when_it_is_planned() -> None:
    with pytest.raises(SamebitsError, match=r"heads of 64: the contract has rows for heads of 128.*head=128"):
        launch.plan(1, 3, None, WarmStart(), "cuda")
    assert launch.plan(1, 3, device="cuda").model.head == 128


def test_all_that_is_set_and_can_change_the_arithmetic_is_recorded() -> None:
    harmless = {
        "HF_HUB_OFFLINE",
        "NO_VCS_VERSION",
        "RAY_raylet_start_wait_time_s",
        "RAY_USAGE_STATS_ENABLED",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
        "PYTHONUNBUFFERED",
    }
    assert set(arms.environment(0, {})) - set(provenance.SWITCHES) == harmless


def test_megatrons_version_is_the_wheels_and_not_that_of_a_repository_around_it() -> None:
    wheel = importlib.metadata.distribution("megatron-core")
    file = str(wheel.locate_file("megatron/core/package_info.py"))
    code = f"import runpy; print(runpy.run_path({file!r})['__version__'])"
    environment = arms.environment(0, os.environ)
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == wheel.version.partition("+")[0]


def test_the_configuration_says_nothing_of_the_arm() -> None:
    text = (launch.CONFIG / "rl.yaml").read_text() + (launch.CONFIG / "sft.yaml").read_text()
    assert arms.SWITCH not in text and "batch_invariant" not in text


# --- the warm start

ENVIRONMENT = arms.environment(0, {})
SMALL = WarmStart(layers=1, hidden=128, steps=45)


def test_the_warm_starts_key_follows_each_of_its_inputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    wheels = {"verl.whl": "a"}
    first = WarmStart().key(wheels, ENVIRONMENT)
    keys = [first, WarmStart(seed=1).key(wheels, ENVIRONMENT), WarmStart(steps=61).key(wheels, ENVIRONMENT)]
    keys += [WarmStart(layers=4).key(wheels, ENVIRONMENT), WarmStart().key({"verl.whl": "b"}, ENVIRONMENT)]
    keys.append(WarmStart().key(wheels, {**ENVIRONMENT, "OMP_NUM_THREADS": "3"}))
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "instruction_set", lambda: ["another"])
        keys.append(WarmStart().key(wheels, ENVIRONMENT))
    with monkeypatch.context() as patch:
        (tmp_path / "cpu.txt").write_text("torch==0")
        patch.setitem(warm_start.LOCKS, "cpu", tmp_path / "cpu.txt")
        keys.append(WarmStart().key(wheels, ENVIRONMENT))
    assert len(set(keys)) == 8 and WarmStart().key(wheels, ENVIRONMENT) == first


def test_both_arms_start_from_the_same_weights() -> None:
    assert SMALL.key({}, ENVIRONMENT) == SMALL.key({}, {**ENVIRONMENT, arms.SWITCH: "1"})


@pytest.mark.parametrize(("instructions", "arm"), [(["avx2", "fma"], 1), (["avx512_bf16", "avx512f"], 0)])
def test_the_arm_that_is_fast_here_teaches_and_the_key_names_it(
    monkeypatch: pytest.MonkeyPatch, instructions: list[str], arm: int
) -> None:
    monkeypatch.setattr(provenance, "instruction_set", lambda: instructions)
    assert warm_start.teacher() == arm
    taught = SMALL.key({}, ENVIRONMENT)
    monkeypatch.setattr(warm_start, "teacher", lambda device: 1 - arm)
    assert SMALL.key({}, ENVIRONMENT) != taught


def test_a_warm_start_is_named_by_its_size_its_seed_and_its_lessons() -> None:
    assert WarmStart(seed=3).name == "qwen3-2x1024-seed3-sft80"
    assert WarmStart(head=128, ffn=512).name == "qwen3-2x1024-head128-ffn512-seed0-sft80"


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": "2"},
        {"steps": "many"},
        {"steps": "0"},
        {"hidden": "100"},
        {"head": "96"},
        {"vocabulary": "100"},
        {"vocabulary": "0"},
    ],
)
def test_a_warm_start_that_cannot_be_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(SamebitsError, match=r"--warm-start.*: give"):
        WarmStart.described(settings)


class Trainer:
    """Stands in for `process.run`: takes half a second, logs its steps, and leaves what verl's SFT trainer leaves."""

    def __init__(self, fails: int = 0) -> None:
        self.calls: list[Mapping[str, str]] = []
        self.fails = fails

    def __call__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
        watch: Callable[[], None],
        what: str,
    ) -> int:
        self.calls.append(environment)
        with log.open("w") as file:
            for step in range(1, SMALL.steps + 1):
                print(f"Epoch 1/9: 3%| 1/9 [00:01<00:08]step:{step} - train/loss:1.0", file=file, flush=True)
                watch()
        time.sleep(0.5)
        if len(self.calls) <= self.fails:
            raise process.RunFailed(what, 1, "ValueError: taught nothing", log)
        (out,) = (text.removeprefix("recipe.out=") for text in command if text.startswith("recipe.out="))
        taught = pathlib.Path(out) / f"global_step_{SMALL.steps}" / "model" / "huggingface"
        taught.mkdir(parents=True)
        (taught / "model.safetensors").write_text("weights")
        return 0


def test_two_runs_at_once_teach_one_warm_start_once(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    trainer, found, said = Trainer(), list[pathlib.Path](), list[str]()
    monkeypatch.setattr(process, "run", trainer)

    def one() -> None:
        found.append(warm_start.obtain(SMALL, {}, tmp_path, {**ENVIRONMENT, arms.SWITCH: "1"}, said.append))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trainer.calls) == 1 and trainer.calls[0][arms.SWITCH] == str(warm_start.teacher())
    assert len(found) == 2 and len(set(found)) == 1 and (found[0] / "model.safetensors").read_text() == "weights"
    assert "warm start: another run teaches it; waiting" in said
    assert [text for text in said if "step" in text] == ["warm start: step 20 of 45", "warm start: step 40 of 45"]
    assert sorted(path.name for path in (tmp_path / "warm-start").iterdir()) == [found[0].name, f"{found[0].name}.lock"]


def test_a_warm_start_that_failed_is_not_kept_and_is_taught_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    trainer = Trainer(fails=1)
    monkeypatch.setattr(process, "run", trainer)
    with pytest.raises(process.RunFailed, match="taught nothing"):
        warm_start.obtain(SMALL, {}, tmp_path, ENVIRONMENT)
    assert (warm_start.obtain(SMALL, {}, tmp_path, ENVIRONMENT) / "sft.log").is_file() and len(trainer.calls) == 2


# --- the plan


def test_the_recorded_command_gives_the_same_run_again() -> None:
    planned = launch.plan(0, 3, {"data.train_batch_size": 8, "+data.note": "a b"}, WarmStart(seed=2, steps=60))
    words = planned.command[1:]
    assert "--set" in words and "steps=60" in words and "seed=2" in words
    done = CliRunner().invoke(cli.app, [*words, "--dry-run"])
    assert done.exit_code == 0 and f"configuration: sha256 {planned.config_sha256}" in done.output
    assert planned.config["data"]["note"] == "a b" and "--set '+data.note=a b'" in done.output
    assert planned.config_sha256 != launch.plan(0, 3).config_sha256


def test_the_recorded_command_of_a_run_on_cuda_gives_it_again() -> None:
    planned = launch.plan(1, 2, {"data.train_batch_size": 8}, warm_start.MODELS["qwen3-1.7b"], "cuda")
    words = planned.command[1:]
    assert words[words.index("--device") + 1] == "cuda" and "layers=28" in words and "vocabulary=151936" in words
    done = CliRunner().invoke(cli.app, [*words, "--dry-run"])
    assert done.exit_code == 0 and f"configuration: sha256 {planned.config_sha256}" in done.output
    named = ["run", "rl", "--arm", "1", "--steps", "2", "--out", "x", "--dry-run", "--device", "cuda"]
    named += ["--model", "qwen3-1.7b", "--set", "data.train_batch_size=8"]
    assert f"configuration: sha256 {planned.config_sha256}" in CliRunner().invoke(cli.app, named).output


def test_a_real_models_geometry_is_that_models() -> None:
    settings = warm_start.MODELS["qwen3-1.7b"].settings()
    assert (settings.num_hidden_layers, settings.hidden_size, settings.intermediate_size) == (28, 2048, 6144)
    assert (settings.num_attention_heads, settings.num_key_value_heads, settings.head_dim) == (16, 8, 128)
    assert len(model.tokenizer(1024)) == 1024
    done = CliRunner().invoke(cli.app, ["run", "rl", "--arm", "1", "--out", "x", "--dry-run", "--model", "another"])
    assert done.exit_code == 2 and "qwen3-1.7b" in done.output


@pytest.mark.parametrize("key", ["recipe.out", "+recipe.x", "hydra.run.dir", "hydra/launcher", "trainer.device"])
def test_what_the_recipe_fills_in_is_not_overridden(key: str) -> None:
    with pytest.raises(launch.OverrideError, match=r"--set .*use them, or set another key"):
        launch.plan(0, 3, {key: "x"})


@pytest.mark.parametrize(("key", "value"), [("data.nothing", "1"), ("data.train_batch_size", "[")])
def test_an_override_that_hydra_refuses_is_one_message(key: str, value: str) -> None:
    with pytest.raises(launch.OverrideError, match=r"the recipe's configuration: .*correct the --set"):
        launch.plan(0, 3, {key: value})


def test_a_setting_without_a_value_is_a_usage_error() -> None:
    done = CliRunner().invoke(cli.app, ["run", "rl", "--arm", "0", "--out", "x", "--dry-run", "--set", "data"])
    assert done.exit_code == 2 and "KEY=VALUE" in done.output


def test_the_script_plans_the_same_run_and_starts_nothing(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "launch_recipe.sh", "0", tmp_path / "run"],
        env={**os.environ, "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    planned = launch.plan(0, 3)
    assert planned.config_sha256 in done.stdout and " ".join(planned.command) in done.stdout
    assert list(tmp_path.iterdir()) == []


# --- the output folder


def finished(folder: pathlib.Path) -> pathlib.Path:
    """What a run leaves, in small."""
    with launch._claimed(folder):
        eventlog.append(folder / "events.jsonl", "judged")
        (folder / "capsules").mkdir()
        (folder / "capsules" / "x").write_text("x")
    return folder


def test_an_output_folder_is_used_once(tmp_path: pathlib.Path) -> None:
    folder = finished(tmp_path / "run")
    with pytest.raises(launch.OutputInUse, match=r"holds a run already: .*or --replace it"), launch._claimed(folder):
        pass


def test_a_run_that_is_over_is_replaced_on_request(tmp_path: pathlib.Path) -> None:
    with launch._claimed(finished(tmp_path / "run"), replace=True):
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: pathlib.Path, replace: bool) -> None:
    with launch._claimed(finished(tmp_path / "run"), replace=True):
        (tmp_path / "run" / "events.jsonl").write_text("x")
        refused = pytest.raises(launch.OutputInUse, match="a run is using it: wait, or choose another --out")
        with refused, launch._claimed(tmp_path / "run", replace):
            pass
        assert (tmp_path / "run" / "events.jsonl").exists()


@pytest.mark.parametrize("names", [["thesis.tex"], ["run.lock", "thesis.tex"]])
def test_a_folder_that_is_no_runs_is_refused_and_left_alone(tmp_path: pathlib.Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(launch.OutputInUse, match="choose another --out"), launch._claimed(tmp_path, replace=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_run_that_fails_says_so_in_its_event_log(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def fail(*_: Any) -> None:
        raise process.RunFailed("verl's trainer", 1, "EngineDeadError: gone", tmp_path / "log")

    monkeypatch.setattr(launch, "_run", fail)
    page = tmp_path / "report.html"
    page.write_text("the page of an earlier run")
    with pytest.raises(process.RunFailed):
        launch.run_rl(0, 3, tmp_path / "run", page=page)
    (entry,) = eventlog.read(tmp_path / "run" / "events.jsonl").entries
    assert (entry["event"], entry["data"]) == ("failed", {"error": "EngineDeadError: gone"})
    assert not page.exists()


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 1)])
def test_the_page_is_drawn_whatever_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, verdict: str, code: int
) -> None:
    receipt = {"verdict": verdict, "claim": "observe", "compares": [], "reasons": []}
    monkeypatch.setattr(launch, "_run", lambda *_: receipt)
    monkeypatch.setattr(launch, "render", lambda runs, page: page.write_text(json.dumps([run.name for run in runs])))
    page = tmp_path / "page.html"
    done = CliRunner().invoke(
        cli.app, ["run", "rl", "--arm", "0", "--out", str(tmp_path / "run"), "--report", str(page)]
    )
    assert done.exit_code == code and f"observe: {verdict.upper()}" in done.output
    assert page.read_text() == '["run"]'


@pytest.mark.parametrize(("verdicts", "code"), [(("pass", "pass"), 0), (("pass", "fail"), 1), (("fail", "pass"), 1)])
def test_the_loop_runs_both_arms_and_draws_both_whatever_the_verdicts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, verdicts: tuple[str, str], code: int
) -> None:
    ran: list[int] = []

    def run(planned: launch.Plan, *_: Any) -> dict[str, Any]:
        ran.append(planned.arm)
        return {"arm": planned.arm, "verdict": verdicts[planned.arm], "claim": "x", "compares": [], "reasons": []}

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setattr(arms, "contract", lambda arm, device: None)
    monkeypatch.setattr(launch, "render", lambda runs, page: page.write_text(json.dumps([run.name for run in runs])))
    done = CliRunner().invoke(cli.app, ["run", "loop", "--out", str(tmp_path)])
    assert done.exit_code == code and ran == [0, 1]
    assert f"BI=0  x: {verdicts[0].upper()}" in done.output and f"BI=1  x: {verdicts[1].upper()}" in done.output
    assert (tmp_path / "report.html").read_text() == '["bi0", "bi1"]'


# --- the child process

LOG = """\
UserWarning: torchtitan engine is not available: ModuleNotFoundError("No module named 'torchtitan'")
(WorkerDict pid=7) \x1b[36mINFO\x1b[0m all is well
(Worker pid=20424) ERROR 11-29 15:00:49 [multiproc_executor.py:1007] RuntimeError: CPU Generator does not use offset
ray.exceptions.RayTaskError(EngineDeadError): ray::Server.generate()
"""


def test_the_first_error_is_named_and_optional_packages_are_none() -> None:
    assert process.first_error(LOG) == "RuntimeError: CPU Generator does not use offset"
    assert process.first_error("step:1 - actor/lr:0.001\nError rate 0.2 of the sensor\n") is None


def test_a_child_that_fails_is_an_error_with_the_first_error_and_the_log(tmp_path: pathlib.Path) -> None:
    script = "print('KeyError: the first'); print('ValueError: the second'); raise SystemExit(3)"
    with pytest.raises(process.RunFailed, match=r"the child ended with code 3. First error: KeyError: the first"):
        process.run([sys.executable, "-c", script], os.environ, tmp_path / "log", what="the child")


# A grandchild in a process group of its own that ignores SIGTERM, as Ray's and vLLM's may be. It says when it is ready.
STUBBORN = """
import os, signal, subprocess, sys
code = (
    "import os, signal, time; os.SPLIT(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(os.getpid(), flush=True); time.sleep(600)"
)
grandchild = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(os.getpid(), grandchild.stdout.readline(), flush=True)
"""


def gone(log: pathlib.Path) -> bool:
    """Whether the processes that a log names have ended."""
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_what_a_child_left_running_ends_with_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE_S", 1.0)
    script = STUBBORN.replace("SPLIT", "setpgrp")
    process.run([sys.executable, "-c", script], os.environ, tmp_path / "log")
    assert gone(tmp_path / "log")


def test_what_left_the_session_while_it_was_watched_ends_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_S", 1.0)
    monkeypatch.setattr(process, "LOOK_S", 0.1)
    script = STUBBORN.replace("SPLIT", "setsid") + "import time; time.sleep(2)"
    process.run([sys.executable, "-c", script], os.environ, tmp_path / "log")
    assert gone(tmp_path / "log")


def test_an_error_of_the_watch_ends_the_child(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE_S", 1.0)

    def watch() -> None:
        if len((tmp_path / "log").read_text().split()) == 2:
            raise OSError("no space")

    script = STUBBORN.replace("SPLIT", "setpgrp") + "import time; time.sleep(600)"
    with pytest.raises(OSError, match="no space"):
        process.run([sys.executable, "-c", script], os.environ, tmp_path / "log", watch)
    assert gone(tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_us_only_after_all_that_we_started(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    script = STUBBORN.replace("SPLIT", "setpgrp") + "import time; time.sleep(600)"
    us = f"""
import os, pathlib, sys
from samebits.recipe import process
process.PATIENCE_S = 1.5
process.run([sys.executable, "-c", {script!r}], os.environ, pathlib.Path({str(tmp_path / "log")!r}))
"""
    running = subprocess.Popen([sys.executable, "-c", us], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() or len((tmp_path / "log").read_text().split()) < 2:
        assert running.poll() is None and time.monotonic() < deadline, "the child did not start"
        time.sleep(0.05)
    running.send_signal(number)
    time.sleep(0.3)
    running.send_signal(number)  # an impatient second one, while the first is being followed
    _, said = running.communicate(timeout=30)
    expected = -number if number == signal.SIGINT else 128 + number
    assert running.returncode == expected and gone(tmp_path / "log"), said


def test_the_handlers_of_signals_are_put_back(tmp_path: pathlib.Path) -> None:
    before = [signal.getsignal(number) for number in process._ENDING]
    during: list[Any] = []
    code = "import time; time.sleep(0.1)"
    process.run(
        [sys.executable, "-c", code],
        os.environ,
        tmp_path / "log",
        lambda: during.append(signal.getsignal(signal.SIGTERM)),
    )
    assert [signal.getsignal(number) for number in process._ENDING] == before and during[0] != before[1]


def test_a_child_of_another_thread_runs_without_them(tmp_path: pathlib.Path) -> None:
    peaks: list[int] = []
    thread = threading.Thread(
        target=lambda: peaks.append(process.run([sys.executable, "-c", ""], os.environ, tmp_path / "log"))
    )
    thread.start()
    thread.join()
    assert len(peaks) == 1


def test_a_childs_memory_is_measured(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.2)
    script = "import time; x = bytearray(b'x') * 300_000_000; time.sleep(1.5)"
    assert 300e6 < process.run([sys.executable, "-c", script], os.environ, tmp_path / "log") < 600e6


def test_the_task_is_loaded_by_path_and_imports_nothing_of_the_package() -> None:
    file = launch.CONFIG.parent / "task.py"
    code = f"import runpy; print(runpy.run_path({str(file)!r})['compute_score']('', '1', '1'))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1.0"
