"""Plants known faults in a copy of this tree, one at a time, and runs the test that finds each.

  python tests/planted_faults.py                  # all of them
  python tests/planted_faults.py train window     # those of a room, those with a word in their name

It shows whether tests that were changed have lost strength. Where a test moves, the entry of its
fault follows it; where it goes, another test has to find the fault.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Fault:
  """An error that a person could make: `new` instead of `old`, which the file has exactly once.

  test: the node id of a test that runs without --full, fails with the fault and passes without it.
  """

  name: str
  file: str
  old: str
  new: str
  test: str

  @property
  def room(self) -> str:
    top, *inner = Path(self.file).with_suffix('').parts
    return inner[0] if top == 'sink_jax' else top


FAULTS = [
  # The definition of attention and its components.
  Fault(
    'a window shows one key more',
    'sink_jax/attention/mask.py',
    'j > i - self.window',
    'j >= i - self.window',
    'tests/attention/test_slots.py::test_key_ranges_are_the_smallest_that_hold_every_visible_key',
  ),
  Fault(
    'the score of an extra key is not divided by sqrt(Dh)',
    'sink_jax/attention/spec.py',
    'soft_cap(product / math.sqrt(head_dim)',
    'soft_cap(product',
    'tests/attention/test_oracle.py::test_values_gradients_and_importance[kv bias (Table 4)]',
  ),
  Fault(
    'an extra key counts as the first token',
    'sink_jax/attention/reference.py',
    'weights, proxy = weights[..., 1:], proxy[..., 1:]',
    'weights, proxy = weights[..., :-1], proxy[..., :-1]',
    'tests/attention/test_oracle.py::test_values_gradients_and_importance[kv bias (Table 4)]',
  ),
  Fault(
    'query heads share a key head in turns, not as neighbours',
    'sink_jax/attention/reference.py',
    'q_BxLxHxDh.reshape(B, L, k_BxTxHkvxDh.shape[2], -1, Dh)',
    'q_BxLxHxDh.reshape(B, L, -1, k_BxTxHkvxDh.shape[2], Dh).swapaxes(2, 3)',
    'tests/attention/test_oracle.py::test_values_gradients_and_importance[softmax]',
  ),
  Fault(
    'the eps of RMSNorm stands outside of the root',
    'sink_jax/attention/__init__.py',
    'keepdims=True) + eps))',
    'keepdims=True)) + eps)',
    'tests/attention/test_oracle.py::test_values_gradients_and_importance[head norm]',
  ),
  # Kernels.
  Fault(
    'the last tile that a query sees in part is left out',
    'sink_jax/kernels/block_mask.py',
    'last = -(-np.maximum.reduceat(hi, starts) // block_k)',
    'last = np.maximum.reduceat(hi, starts) // block_k',
    'tests/kernels/test_block_mask.py::'
    'test_tiles_hold_all_that_is_visible_and_full_ones_nothing_else',
  ),
  Fault(
    'the cotangent of the row sums is dropped',
    'sink_jax/kernels/score_tile.py',
    'return result.row_stats_BxHxT, dstat + dpower - delta',
    'return result.row_stats_BxHxT, -delta',
    'tests/kernels/test_flash.py::test_rows_and_all_cotangents',
  ),
  Fault(
    'importance divides by one row too many',
    'sink_jax/kernels/importance.py',
    'length_Bx1x1 - jnp.arange(keys)',
    'length_Bx1x1 - jnp.arange(keys) + 1',
    'tests/kernels/test_implementations.py::test_blocks_and_spans_change_nothing',
  ),
  Fault(
    'cuDNN gets a window with one key more',
    'sink_jax/kernels/library_kernels.py',
    '(window - 1, 0)',
    '(window, 0)',
    'tests/kernels/test_implementations.py::test_cudnn_gets_arguments_that_mean_the_definition',
  ),
  # Models.
  Fault(
    'top_p leaves out the token with which it is reached',
    'sink_jax/models/generate.py',
    'jnp.cumsum(p_SxK, -1) - p_SxK < self.top_p',
    'jnp.cumsum(p_SxK, -1) < self.top_p',
    'tests/models/test_generate.py::test_tokens_that_are_sampled',
  ),
  Fault(
    'a full cache shows a token that it has dropped',
    'sink_jax/models/decode.py',
    'new_L - self.recent + 1)',
    'new_L - self.recent)',
    'tests/models/test_decode.py::test_positions_are_those_of_the_tokens_in_the_cache',
  ),
  Fault(
    'a parallel network reads what attention has changed',
    'sink_jax/models/transformer.py',
    'h_BxTxD if config.parallel_residual else None',
    'None',
    'tests/pretrained/test_parity.py::test_stored_fixtures[falcon]',
  ),
  Fault(
    'the initial scale of the last matrix of a block ignores the depth',
    'sink_jax/models/layers.py',
    '(math.sqrt(config.ffn_hidden) * config.layers)',
    'math.sqrt(config.ffn_hidden)',
    'tests/models/test_transformer.py::test_initialisations',
  ),
  # Data.
  Fault(
    'a loss of answers weighs the inputs, not the targets',
    'sink_jax/data/dataset.py',
    'tokens[:, 1:], weights[:, 1:]',
    'tokens[:, 1:], weights[:, :-1]',
    'tests/data/test_chat.py::test_tokens_and_weights_of_a_conversation_by_hand',
  ),
  Fault(
    'every epoch has the order of the first',
    'sink_jax/data/dataset.py',
    '_FAR_APART % 2**32 + epochs)',
    '_FAR_APART % 2**32 + 0 * epochs)',
    'tests/data/test_dataset.py::test_the_order_is_that_of_grain',
  ),
  Fault(
    'validation leaves out what does not fill a batch',
    'sink_jax/data/batches.py',
    '-(-len(self._numbers) // self._batch_size)',
    'len(self._numbers) // self._batch_size',
    'tests/data/test_dataset.py::test_validation_covers_everything_once_in_a_fixed_order',
  ),
  Fault(
    'the CRC of a row is not compared',
    'sink_jax/data/packed.py',
    " or zlib.crc32(row[:-4]) != int.from_bytes(row[-4:], 'little')",
    '',
    'tests/data/test_packed.py::test_every_damaged_row_is_named_with_its_file',
  ),
  Fault(
    'a range of gs:// ends a byte early',
    'sink_jax/data/packed.py',
    'begin + self._row.itemsize for',
    'begin + self._row.itemsize - 1 for',
    'tests/data/test_packed.py::test_rows_in_any_order_and_from_a_store_by_one_request_each',
  ),
  Fault(
    'a text that spells a special token gets its id',
    'sink_jax/data/tokenizer.py',
    'self.model.encode_special_tokens = not special',
    'self.model.encode_special_tokens = special',
    'tests/data/test_tokenizer.py::'
    'test_special_tokens_in_a_text_are_text_unless_they_are_asked_for',
  ),
  # Importers.
  Fault(
    'Gemma 3 has one rotary base in all blocks',
    'sink_jax/pretrained/llama.py',
    "'rope_local_base_freq', float, 1e4",
    "'rope_local_base_freq', float, 1e6",
    'tests/pretrained/test_config.py::test_a_kind_of_layers_has_the_base_of_its_family',
  ),
  Fault(
    'the windows of Qwen begin one layer late',
    'sink_jax/pretrained/llama.py',
    'window is not None and i >= first',
    'window is not None and i > first',
    'tests/pretrained/test_config.py::test_windows_of_qwen3',
  ),
  Fault(
    'Gemma adds one to a gain after its factor, not before',
    'sink_jax/pretrained/stored_tensors.py',
    '(np.asarray(x, np.float32) + added) * factor',
    'np.asarray(x, np.float32) * factor + added',
    'tests/pretrained/test_parity.py::test_stored_fixtures[gemma3_images]',
  ),
  Fault(
    'keys and values of a fused tensor are exchanged',
    'sink_jax/pretrained/stored_tensors.py',
    "'key': slice(group, group + 1), 'value': slice(group + 1, None)",
    "'value': slice(group, group + 1), 'key': slice(group + 1, None)",
    'tests/pretrained/test_parity.py::test_stored_fixtures[falcon]',
  ),
  Fault(
    'queries and keys of a GGUF file keep its order of channels',
    'sink_jax/pretrained/gguf.py',
    'pairs.swapaxes(1, 2)',
    'pairs',
    'tests/pretrained/test_gguf.py::test_a_file_equals_its_safetensors',
  ),
  Fault(
    'the scale of an MXFP4 block is halved',
    'sink_jax/pretrained/moe.py',
    'np.arange(256)[:, None, None] - 127',
    'np.arange(256)[:, None, None] - 128',
    'tests/pretrained/test_mxfp4.py::test_all_values_at_all_scales',
  ),
  # Training.
  Fault(
    'the learning rate is a step ahead',
    'sink_jax/train/loop.py',
    'learning_rate(job.optimizer, last, step - 1)',
    'learning_rate(job.optimizer, last, step)',
    'tests/train/test_loop.py::test_a_run_is_a_loop_over_steps_and_leaves_a_full_record',
  ),
  Fault(
    'a probe is taken a step early',
    'sink_jax/train/evaluation.py',
    'always or n and step % n == 0',
    'always or n and (step + 1) % n == 0',
    'tests/train/test_loop.py::test_a_run_is_a_loop_over_steps_and_leaves_a_full_record',
  ),
  Fault(
    'a resumed run repeats a batch',
    'sink_jax/train/loop.py',
    'job.data.batches(start, ',
    'job.data.batches(max(0, start - 1), ',
    'tests/train/test_loop.py::test_stopped_and_resumed_equals_in_one_go[as it is]',
  ),
  Fault(
    'SIGTERM ends a run without a save',
    'sink_jax/train/loop.py',
    'saving = stopping or asked.save or step == last',
    'saving = asked.save or step == last',
    'tests/train/test_loop.py::test_a_request_to_stop_saves_before_it_measures',
  ),
  Fault(
    'the key probe.dtype is ignored',
    'sink_jax/train/evaluation.py',
    'self._probe_tokens, dtype=settings.dtype)',
    'self._probe_tokens)',
    'tests/train/test_loop.py::test_probes_and_gradients_have_the_dtype_of_the_config',
  ),
  Fault(
    'the loss is a mean over tokens without weight, too',
    'sink_jax/train/step.py',
    'jnp.sum(training_weights(batch.weights, config))',
    'batch.weights.size',
    'tests/train/test_loop.py::test_the_loss_of_answers_alone_is_their_weighted_mean',
  ),
  Fault(
    'gradients are clipped after the update rule',
    'sink_jax/train/optimizer.py',
    'return optax.chain(',
    'return (lambda clip, rule, *rest: optax.chain(rule, clip, *rest))(',
    'tests/train/test_optimizer.py::test_three_updates_are_those_of_the_formula',
  ),
  Fault(
    'weight decay acts on the gains of norms',
    'sink_jax/train/optimizer.py',
    'lambda path, _: is_matrix(path)',
    'lambda path, x: x.ndim > 1',
    'tests/train/test_optimizer.py::test_decay_on_matrices_spares_embeddings_gains_and_biases',
  ),
  Fault(
    'the mesh splits the outputs of W_O, not its inputs',
    'sink_jax/models/sharding.py',
    "(r'attention/out/kernel', 3, 1)",
    "(r'attention/out/kernel', 3, 2)",
    'tests/train/test_meshes.py::test_parameters_are_split_by_the_table',
  ),
  # Sweeps: configs, trials, plans.
  Fault(
    'a budget keeps the weight decay at another learning rate',
    'configs/budget.py',
    'optimizer.weight_decay / self.rate',
    'optimizer.weight_decay',
    'tests/test_configs.py::test_a_grid_tries_five_rates_at_the_product_of_the_paper',
  ),
  Fault(
    'shards count from zero',
    'sink_jax/sweep/trials.py',
    '[int(part) - 1 :: int(parts)]',
    '[int(part) :: int(parts)]',
    'tests/sweep/test_trials.py::test_shards_are_a_partition',
  ),
  Fault(
    'a plan forgets the optimizer while it validates',
    'sink_jax/plan/job.py',
    "(0 if name == 'training' else optimizer)",
    '0',
    'tests/plan/test_plan.py::test_a_plan_has_the_memory_of_training_validation_and_the_probe',
  ),
  # Files, exit codes, launchers.
  Fault(
    'a byte order mark is text',
    'sink_jax/io/files.py',
    '.removeprefix(_BYTE_ORDER_MARK)',
    '',
    'tests/io/test_files.py::test_a_byte_order_mark_at_the_start_is_not_text',
  ),
  Fault(
    'a training that was stopped ends as if it had failed',
    'sink_jax/cli/train.py',
    'sys.exit(EXIT_SAVED)',
    'sys.exit(1)',
    'tests/cli/test_main.py::test_every_way_in_which_training_ends_has_its_exit_code',
  ),
  Fault(
    'a SLURM job is queued once more than RESTARTS',
    'launch/slurm.sbatch',
    '${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-100}',
    '${SLURM_RESTART_COUNT:-0} <= ${RESTARTS:-100}',
    'tests/launchers/test_launchers.py::test_a_slurm_job_queues_again_or_not',
  ),
  # Metrics, inputs and maps.
  Fault(
    'importance divides by all rows',
    'sink_jax/evaluate/sinks.py',
    'alpha = maps.sum(-2, dtype=wide) / rows_seeing_k',
    'alpha = maps.sum(-2, dtype=wide) / size',
    'tests/evaluate/test_sinks.py::test_importance_by_hand',
  ),
  Fault(
    'a ratio of norms has the first token on both sides',
    'sink_jax/evaluate/sink_report.py',
    'mean_N(mean_of_text(norms[..., 1:]))',
    'mean_N(mean_of_text(norms))',
    'tests/evaluate/test_probe.py::test_a_report_is_what_the_maps_say',
  ),
  Fault(
    'BOS may be drawn as a random token',
    'sink_jax/evaluate/inputs.py',
    'tokens += tokens >= left_out',
    'tokens += tokens > left_out',
    'tests/evaluate/test_inputs.py::test_drawn_tokens',
  ),
  Fault(
    'the importance of maps is of raw weights',
    'sink_jax/evaluate/head_maps.py',
    'return self.normalized[..., 0].mean(-1)',
    'return self.raw[..., 0].mean(-1)',
    'tests/evaluate/test_plots.py::test_maps_are_what_the_probe_measured[sigmoid]',
  ),
  Fault(
    'evaluate reads more tokens of a run than it is asked to',
    'sink_jax/analyses/models.py',
    '[:sequences, :length]',
    '[:sequences]',
    'tests/evaluate/test_evaluate_command.py::test_the_command_on_a_part_of_the_probe_tokens',
  ),
  # Analyses.
  Fault(
    'the threshold comes after the mean over sequences',
    'sink_jax/analyses/importance.py',
    '(alpha_SxNxHxK[..., k] > e).mean(',
    '(alpha_SxNxHxK[..., k].mean(0) > e).mean(',
    'tests/analyses/test_importance.py::test_lengths_are_beginnings_of_the_same_sequences',
  ),
  Fault(
    'norms of the others have the first token too',
    'sink_jax/analyses/maps.py',
    'mean_of_text(norms[..., 1:]).mean(axes)',
    'mean_of_text(norms).mean(axes)',
    'tests/analyses/test_heads.py::test_norms',
  ),
  Fault(
    'angles take the key heads in turns',
    'sink_jax/analyses/maps.py',
    'h // (dims.heads // dims.kv_heads)',
    'h % dims.kv_heads',
    'tests/analyses/test_heads.py::test_angles_by_loops_over_queries_and_keys',
  ),
  Fault(
    'the bound of a rotary encoding has half of its exponent',
    'sink_jax/analyses/propositions.py',
    'np.exp(-2 * np',
    'np.exp(-1 * np',
    'tests/analyses/test_propositions.py::test_closed_forms_of_recorded_maps',
  ),
  Fault(
    'the last quarter of a text is its last half',
    'sink_jax/analyses/streaming.py',
    'len(losses) // 4',
    'len(losses) // 2',
    'tests/analyses/test_streaming.py::test_caches_that_hold_everything_agree_and_others_forget',
  ),
  Fault(
    'the first key of a window is the one before it',
    'sink_jax/analyses/trained.py',
    'mean_TxT[beyond, beyond - size + 1]',
    'mean_TxT[beyond, beyond - size]',
    'tests/analyses/test_trained.py::test_window',
  ),
  Fault(
    'the largest logit is a mean over the batch',
    'sink_jax/analyses/recorder.py',
    'largest_logit(seen).max(0)',
    'largest_logit(seen).mean(0)',
    'tests/analyses/test_recorder.py::test_statistics_are_those_of_whole_maps',
  ),
  Fault(
    'a model that fails stops the others',
    'sink_jax/cli/analyses.py',
    'if len(named) == 1:',
    'if named:',
    'tests/analyses/test_command.py::test_one_model_that_fails_spares_the_others',
  ),
  Fault(
    'a run of a synthetic task is read from its last sequences',
    'sink_jax/analyses/models.py',
    '[:sequences, :length]',
    '[::-1][:sequences, :length]',
    'tests/analyses/test_command.py::test_a_run_of_a_synthetic_task_has_its_own_tokens',
  ),
  # Pictures.
  Fault(
    'a head has the cell of its neighbour',
    'sink_jax/pictures/maps.py',
    "heads.index(row['head']),",
    "heads.index(row['head']) - 1,",
    'tests/analyses/test_pictures.py::test_maps_and_grids',
  ),
  Fault(
    "the paper's number next to a bar is ours",
    'sink_jax/pictures/charts.py',
    "[row['paper']] * 2",
    '[0] * 2',
    'tests/analyses/test_pictures.py::test_bars_and_the_papers_number',
  ),
  Fault(
    'a map gives the extra key what the tokens get',
    'sink_jax/report/figures.py',
    'rest_NxHxT = 1 - of.normalized.sum(-1)',
    'rest_NxHxT = of.normalized.sum(-1)',
    'tests/report/test_pages.py::test_the_extra_key_of_a_map_has_what_the_divided_row_leaves',
  ),
  Fault(
    'a mean over seeds counts invalid runs',
    'sink_jax/pictures/charts.py',
    'values_RxP[valid_R].mean(0)',
    'values_RxP.mean(0)',
    'tests/report/test_pages.py::test_runs_that_are_no_evidence_are_crossed_out_and_in_no_mean',
  ),
  # Runs, claims and pages.
  Fault(
    'a stored run stays next to the one that replaces it',
    'sink_jax/report/runs.py',
    'kept = [identity not in replaced for',
    'kept = [True for',
    'tests/report/test_merge.py::test_a_run_replaces_the_stored_one_of_its_seed_and_twice_is_once',
  ),
  Fault(
    'a missing run hides that another refutes a claim',
    'sink_jax/report/claims.py',
    'for verdict in (Verdict.NOT_REPRODUCED, Verdict.NOT_TESTABLE, Verdict.OPEN,',
    'for verdict in (Verdict.NOT_TESTABLE, Verdict.NOT_REPRODUCED, Verdict.OPEN,',
    'tests/report/test_claims.py::test_what_is_missing_or_half_run',
  ),
  Fault(
    'a run with other settings counts as a seed',
    'sink_jax/report/pages.py',
    "valid=full.valid.mask(differs, 'of other settings')",
    'valid=full.valid',
    'tests/report/test_pages.py::test_a_run_with_other_settings_is_not_a_seed_of_its_trial',
  ),
  Fault(
    'an event that is undone has come',
    'sink_jax/report/events.py',
    'if holds else math.inf',
    'if holds else since',
    'tests/report/test_events.py::test_an_event_is_the_first_step_that_stays',
  ),
]


def main(words: list[str]) -> None:
  """Plants the chosen faults, all of them without words; exits with 1 unless each is found."""
  rooms = sorted({fault.room for fault in FAULTS})
  fits = lambda word, fault: word == fault.room if word in rooms else word in fault.name
  for word in words:
    if not any(fits(word, fault) for fault in FAULTS):
      sys.exit(f'{word!r} is not in the name of a fault, and not a room: {", ".join(rooms)}.')
  chosen = [fault for fault in FAULTS if not words or any(fits(word, fault) for word in words)]
  with tempfile.TemporaryDirectory() as folder:
    copy = copied(Path(folder))
    code, said = tested(copy, *sorted({fault.test for fault in chosen}))
    if code:
      sys.exit(f'{said}\nWithout a fault these tests must pass.')
    results = [planted(fault, copy) for fault in chosen]
  print(f'{results.count("found")} of {len(results)} faults found')
  sys.exit(set(results) != {'found'})


def copied(folder: Path) -> Path:
  """A copy of the files that git knows or does not ignore, as they are in this folder now."""
  listed = subprocess.run(
    ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  for name in filter(None, listed.split('\0')):
    if (ROOT / name).exists():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(ROOT / name, folder / name)
  return folder


def planted(fault: Fault, copy: Path) -> str:
  """Runs the test of a fault: 'found', 'NOT FOUND', or 'STALE' if it does not fit the code."""
  file, began = copy / fault.file, time.monotonic()
  sound, code = file.read_text() if file.exists() else '', None
  if sound.count(fault.old) == 1:
    file.write_text(sound.replace(fault.old, fault.new))
    code, _ = tested(copy, fault.test)
    file.write_text(sound)
  # pytest ends with 1 if a test failed, and with more if it could not run one.
  result = {1: 'found', 0: 'NOT FOUND'}.get(code, 'STALE')
  print(f'{result:9} {fault.room}: {fault.name} ({time.monotonic() - began:.0f} s)', flush=True)
  return result


def tested(copy: Path, *tests: str) -> tuple[int, str]:
  """The exit code of pytest in the copy, and what it printed."""
  # A cache of its own: what a fault writes must not be read later.
  environment = {
    'PYTHONPATH': str(copy),
    'JAX_PLATFORMS': 'cpu',
    'SINK_JAX_CACHE': str(copy / '.cache'),
  }
  done = subprocess.run(
    [sys.executable, '-P', '-m', 'pytest', '-x', '-q', *tests],
    cwd=copy,
    env=os.environ | environment,
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout + done.stderr


if __name__ == '__main__':
  main(sys.argv[1:])
