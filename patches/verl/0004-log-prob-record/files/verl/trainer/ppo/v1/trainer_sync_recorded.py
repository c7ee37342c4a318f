"""The synchronous trainer with everything on record: `trainer.v1.trainer_mode=sync_recorded`.

Each step leaves a capsule with the logprobs of the same tokens from the rollout, from the forward-only recomputation
and from the grad-enabled forward of the update; each weight sync leaves one with the hashes of what was sent and of
what the engine holds, and with the engine's logprobs of fixed prompts. `trainer.record` says where and what.
"""

import json
import os
import pathlib
import tempfile
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.log_prob_record import differing_bits, right_padded, write_capsule
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.recording_workers import ObservingActorRolloutRefWorker, RecordingActorRolloutRefWorker


@register_trainer("sync_recorded")
class PPOTrainerSyncRecorded(PPOTrainerSync):
    """Each step both paths are compared with the rollout, bit for bit, and the logger gets
    ``training/rollout_recompute_bits_differ``, ``training/rollout_actor_bits_differ`` and
    ``training/rollout_bits_compared``. A step without a comparison, or with a logprob that is no number, is an error.
    ``trainer.verify`` says what a difference is: ``observe``, a figure; ``strict``, the end of the run, whose capsule
    is written and whose first differing token is named. ``timing_s/verify`` and ``timing_s/record`` are what comparing
    and keeping cost; ``update_actor`` holds both.

    Config, under ``trainer.record``; without it a run compares and keeps nothing:

    dir: output folder; capsules go to ``dir/capsules``.
    execution: JSON file with the identity of the run, copied into every capsule.
    probes: JSON file, a list of prompts as token ids, greedily continued after every sync.
    probe_tokens: length of each continuation.
    save_weights: also write the exported weights of every sync as a checkpoint.
    """

    def __init__(self, config: DictConfig):
        self._verify = str(config.trainer.get("verify", "observe"))
        if self._verify not in ("observe", "strict"):
            raise ValueError(f"trainer.verify={self._verify}: set it to observe or to strict")
        self._bypass = bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))
        if self._bypass:
            raise ValueError(
                "trainer_mode=sync_recorded with algorithm.rollout_correction.bypass_mode=True would compare the rollout "
                "with itself: set bypass_mode=False"
            )
        actor = config.actor_rollout_ref.actor
        if actor.ppo_epochs != 1 or actor.ppo_mini_batch_size != config.data.train_batch_size:
            raise ValueError(
                "trainer_mode=sync_recorded compares one version of the weights a step: set ppo_epochs=1 and "
                "ppo_mini_batch_size=data.train_batch_size"
            )
        if config.actor_rollout_ref.rollout.tensor_model_parallel_size != 1:
            raise ValueError(
                "trainer_mode=sync_recorded reads weights back from one rank of the engine: set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
            )
        if config.actor_rollout_ref.model.get("lora_rank", 0) or config.actor_rollout_ref.model.get("lora_adapter_path"):
            raise ValueError("trainer_mode=sync_recorded describes whole weights, not adapters: set model.lora_rank=0")
        self._refuse_other_distributions(config.actor_rollout_ref.rollout)
        self._record = record = config.trainer.get("record")
        if record:
            self._capsules = pathlib.Path(record.dir) / "capsules"
            self._execution = json.loads(pathlib.Path(record.execution).read_text())
            self._probes: list[list[int]] = json.loads(pathlib.Path(record.probes).read_text())
        super().__init__(config)

    @staticmethod
    def _refuse_other_distributions(rollout: Any) -> None:
        """The trainer takes the log-softmax of logits over the temperature, of the whole vocabulary. The rollout must too."""
        if not rollout.calculate_log_probs:
            raise ValueError("trainer_mode=sync_recorded compares the rollout's logprobs: set rollout.calculate_log_probs=True")
        if rollout.top_p != 1.0 or rollout.top_k not in (-1, 0):
            raise ValueError(
                f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}: the rollout's logprobs would be of a part of the "
                "vocabulary and the trainer's of all of it: set top_p=1 and top_k=-1"
            )
        if rollout.temperature != 1.0 and rollout.logprobs_mode != "processed_logprobs":
            raise ValueError(
                f"rollout.temperature={rollout.temperature} with logprobs_mode={rollout.logprobs_mode}: the rollout's logprobs "
                "would be of logits that no temperature divides, the trainer's of divided ones: set "
                "logprobs_mode=processed_logprobs, or temperature=1"
            )
        aligned, second = (os.environ.get(name) == "1" for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"))
        if rollout.temperature != 1.0 and aligned and second:
            raise ValueError(
                f"rollout.temperature={rollout.temperature} with VLLM_USE_V2_MODEL_RUNNER=1: that runner divides by an "
                "approximate quotient and the trainer by IEEE's: set temperature=1, or VLLM_USE_V2_MODEL_RUNNER=0"
            )

    def _build_replay_buffer(self):
        # Sampling, refilling and checkpoints ask for the mode by name; this one is "sync" in all of them.
        self.trainer_mode = "sync"
        return super()._build_replay_buffer()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            if worker.__ray_actor_class__ is ActorRolloutRefWorker:
                kind = RecordingActorRolloutRefWorker if self._record else ObservingActorRolloutRefWorker
                self.role_worker_mapping[role] = ray.remote(kind)

    def on_init_end(self) -> None:
        super().on_init_end()
        if self._record:
            self._record_sync(self.global_steps)
        else:
            with tempfile.TemporaryDirectory() as folder:
                self._resident(pathlib.Path(folder) / "loaded.json", tensors=False)

    def on_step_end(self) -> None:
        super().on_step_end()
        if self._record:
            with marked_timer("record", self.timing_raw):
                self._record_sync(self.global_steps)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        count = len(batch)
        index = tu.get_tensordict({"record_index": torch.arange(count)})
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=index)
        batch = super()._update_actor(batch, metrics)
        with marked_timer("verify", self.timing_raw):
            ranks = self.actor_rollout_wg.take_update_record()
            tensors = self._step_tensors(batch, ranks)
        if self._record:
            with marked_timer("record", self.timing_raw):
                self._record_step(tensors, ranks)
        with marked_timer("verify", self.timing_raw):
            metrics.update(self._verify_step(tensors))
        return batch

    def _verify_step(self, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """Compares a step's three logprobs of each valid token; the figures for the logger."""
        valid, step = tensors["valid"], self.global_steps
        figures = {"training/rollout_bits_compared": float(valid.sum())}
        for path in ("recompute", "actor"):
            try:
                differ = differing_bits(valid, tensors["rollout"], tensors[path])
            except ValueError as error:
                raise RuntimeError(f"step {step}, rollout and {path}: {error}") from error
            figures[f"training/rollout_{path}_bits_differ"] = float(len(differ))
            if len(differ) and self._verify == "strict":
                row, column = differ[0].tolist()
                token = int(tensors["responses"][row, column])
                said = (float(tensors[name][row, column]).hex() for name in ("rollout", path))
                kept = f"All of them are in {self._capsules.name}/step-{step:04d}; " if self._record else ""
                raise RuntimeError(
                    f"step {step}: {len(differ)} of {int(valid.sum())} logprobs of rollout and {path} differ; the first is "
                    f"of sample {row}, token {column} (id {token}): {' and '.join(said)}. {kept}"
                    "trainer.verify=observe goes on"
                )
        return figures

    def _step_tensors(self, batch: KVBatchMeta, ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """What the three paths said of a step's tokens, a row a sample, and what else a step capsule holds."""
        fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "advantages", "rm_scores"]
        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=[*fields, "uid", "extra_fields", "record_index"],
        )
        # Each row says which sample it is. verl fills a batch up with rows that stand for none; they are left out.
        filler = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        numbers = data["record_index"].tolist()
        kept = [row for row, number in enumerate(numbers) if not filler[number]]
        place = {numbers[row]: new for new, row in enumerate(kept)}
        rows = {name: [values[row] for row in kept] for name in fields for values in [data[name].unbind()]}
        taken = [i for rank in ranks for index, _ in rank["log_probs"] for i in index.tolist()]
        seen = [row for rank in ranks for _, log_probs in rank["log_probs"] for row in log_probs]
        actor = {place[i]: row for i, row in zip(taken, seen, strict=True) if i in place}
        if len(actor) != len(kept):
            raise RuntimeError(
                f"step {self.global_steps}: the update took {len(actor)} of {len(kept)} samples; none may be skipped"
            )
        groups: dict[str, int] = {}
        uids, extras = list(data["uid"]), list(data["extra_fields"])
        lengths = [len(response) for response in rows["responses"]]
        return {
            "prompts": right_padded(rows["prompts"], torch.int64),
            "prompt_length": torch.tensor([len(prompt) for prompt in rows["prompts"]]),
            "responses": right_padded(rows["responses"], torch.int64),
            "valid": right_padded(rows["response_mask"], torch.bool),
            "rollout": right_padded(rows["rollout_log_probs"], rows["rollout_log_probs"][0].dtype),
            "recompute": right_padded(rows["old_log_probs"], rows["old_log_probs"][0].dtype),
            "actor": right_padded([actor[i][:length] for i, length in enumerate(lengths)], actor[0].dtype),
            "order": torch.tensor([place[i] for i in taken if i in place]),
            "advantages": right_padded(rows["advantages"], torch.float32),
            "reward": torch.stack([score.sum().float() for score in rows["rm_scores"]]),
            "group": torch.tensor([groups.setdefault(str(uids[row]), len(groups)) for row in kept]),
            "seed": torch.tensor([extras[row].get("sampling_seed", -1) for row in kept]),
        }

    def _record_step(self, tensors: dict[str, torch.Tensor], ranks: list[dict[str, Any]]) -> None:
        update = dict(ranks[0]["updates"][0])
        # Every rank of a data-parallel group steps the same mains: rank 0 speaks for all on this engine.
        update["update_rms"] = (update.pop("update_square_sum") / update["parameters"]) ** 0.5
        step = self.global_steps
        write_capsule(
            self._capsules / f"step-{step:04d}",
            {
                "kind": "step",
                "step": step,
                "weights": f"theta{step - 1}",
                "bypass": self._bypass,
                "execution": self._execution,
                "update": {
                    "from": f"theta{step - 1}",
                    "to": f"theta{step}",
                    **update,
                },
            },
            tensors,
        )

    def _record_sync(self, step: int) -> None:
        folder = self._capsules / f"sync-{step:04d}"
        self._capsules.mkdir(parents=True, exist_ok=True)
        weights = str(self._capsules.parent / "weights" / f"theta{step}") if self._record.save_weights else None
        exported = self.actor_rollout_wg.take_exported(weights)[0]
        resident, contracts, rope = self._resident(self._capsules / f".loaded-{step:04d}.json")
        write_capsule(
            folder,
            {
                "kind": "sync",
                "sync": step,
                "weights": f"theta{step}",
                "execution": self._execution,
                "contracts": contracts,
                "rope": rope,
                "exported": exported,
                "loaded": resident["tensors"],
            },
            self._probe(self._server(), step),
        )

    def _server(self) -> Any:
        return self.llm_server_manager.get_replicas()[0].servers[0]

    def _resident(self, table: pathlib.Path, tensors: bool = True) -> tuple[dict, dict, dict]:
        """What the engine holds, with the contracts and the RoPE tables of both sides, which must be one.

        Args:
            table: a file that the engine writes; it is removed again.
            tensors: describe the weights too.
        """
        arguments = {"path": str(table), "tensors": tensors}
        ray.get(self._server().collective_rpc.remote("write_resident_weights", kwargs=arguments))
        resident = json.loads(table.read_text())
        table.unlink()
        contracts = {"trainer": self.actor_rollout_wg.contract_name()[0], "rollout": resident["contract"]}
        if contracts["trainer"] != contracts["rollout"]:
            raise RuntimeError(
                f"the trainer computes by {contracts['trainer'] or 'no numerical contract'} and its rollout by "
                f"{contracts['rollout'] or 'none'}: install the same operators on both sides, and set "
                "VLLM_BATCH_INVARIANT alike for both"
            )
        rope = {"trainer": self.actor_rollout_wg.rope_table()[0], "rollout": resident["rope"]}
        if contracts["trainer"] and rope["trainer"] != rope["rollout"]:
            raise RuntimeError(
                f"the trainer rotates by the table {rope['trainer']} and its rollout by {rope['rollout']}: torch makes it "
                "on both sides, so install one torch for both, and one config of the model"
            )
        return resident, contracts, rope

    def _probe(self, server: Any, step: int) -> dict[str, torch.Tensor]:
        """Continues each probe greedily, one request at a time, so that no neighbour can touch its bits."""
        tokens, log_probs = [], []
        for number, prompt in enumerate(self._probes):
            greedy = {"temperature": 0.0, "max_tokens": self._record.probe_tokens, "logprobs": True, "ignore_eos": True}
            output = ray.get(server.generate.remote(list(prompt), greedy, f"probe-{step}-{number}"))
            tokens.append(torch.tensor([*prompt, *output.token_ids]))
            log_probs.append(torch.tensor([*[0.0] * len(prompt), *output.log_probs]))
        # The rollout that follows must not find the probes' keys and values in its cache.
        ray.get(server.clear_kv_cache.remote())
        return {
            "probe_tokens": right_padded(tokens, torch.int64),
            "probe_length": torch.tensor([len(row) for row in tokens]),
            "probe_prompt_length": torch.tensor([len(prompt) for prompt in self._probes]),
            "probe_log_probs": right_padded(log_probs, torch.float32),
        }
