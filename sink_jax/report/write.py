"""A comparison of runs as files: one HTML page, Markdown, JSON and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sink_jax.evaluate.maps import HeadMaps, head_maps
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.pretrained.load import load_run
from sink_jax.report import images
from sink_jax.report.comparison import Comparison, Picture, RunGroup, build
from sink_jax.report.jsontext import to_json
from sink_jax.report.page import page
from sink_jax.report.read_runs import read_runs
from sink_jax.report.records import RunRecord, made_by
from sink_jax.train.checkpoint import CheckpointError


def compare(directory: str | AnyPath, out: str | AnyPath, with_maps: bool = True
            ) -> Comparison:
  """Writes index.html, report.md, report.json and PNGs about all runs below a folder.

  Raises:
    ValueError: no runs in `directory`. OSError: `out` cannot be written.
  """
  directory = to_path(directory)
  report = build(read_runs(directory))
  report = dataclasses.replace(
      report, provenance=made_by(report.runs.values()),
      groups=[_with_pictures(group, directory, with_maps) for group in report.groups])
  page(report).write(to_path(out), to_json(report))
  return report


def _with_pictures(group: RunGroup, directory: AnyPath, with_maps: bool) -> RunGroup:
  """The group with its curves and attention maps, and what they lack."""
  probed = [run for run in group.runs if run.probe is not None]
  pictures = []
  if probed:
    extra_key = any(run.probe and run.probe.sink_extra_key is not None for run in probed)
    pictures.append(Picture(
        f'curves-{group.key}.png',
        'Sink_1 and the largest importance of the first token over heads, against step. Dashed '
        'lines and * are of proxy scores' + (', dotted lines of the extra key.' if extra_key
                                             else '.'),
        images.sink_curves(probed)))
  # Loading a checkpoint takes seconds; --nomaps leaves it out.
  maps, missing = _maps(directory, probed) if with_maps else ({}, [])
  if maps:
    sequences = next(iter(maps.values())).sequences
    pictures.append(Picture(
        f'attention-{group.key}.png',
        'The head of every variant with the largest importance of the first token: its attention '
        f'at the last checkpoint, averaged over the probe sequences ({sequences}).',
        images.strongest_heads(maps)))
  return dataclasses.replace(group, pictures=pictures, notes=[*group.notes, *missing])


def _maps(directory: AnyPath, runs: Sequence[RunRecord]
          ) -> tuple[Mapping[str, HeadMaps], list[str]]:
  """Maps of the runs whose checkpoint can be read, and a line about every other."""
  maps, missing = {}, []
  for run in runs:
    folder = directory / run.name  # or the folder itself, which is named after itself
    try:
      model = load_run(folder if folder.is_dir() else directory)
      if model.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy.')
      maps[run.name] = head_maps(model, model.probe_tokens)
    # A run may have no checkpoint yet, or have lost it; its other numbers are still shown.
    except (ValueError, CheckpointError) as error:
      missing.append(f'No attention map of {run.name}: {" ".join(str(error).split())}')
  return maps, missing
