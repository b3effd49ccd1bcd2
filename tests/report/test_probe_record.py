"""Massive activations and nulls as reports read them from rows of the probe, and say them."""

import json

import pytest

from sink_jax.report.comparison import as_text, build, columns
from sink_jax.report.jsontext import to_json
from sink_jax.report.probe_record import BlockActivations, probe_record
from sink_jax.report.sentences import sentences
from tests.report.test_report import EXTRA_KEY, FLAT, GROWING, probe_row, write

# Three blocks after the embedding; what is massive was planted in the second one.
DESCRIBED = dict(
    activation_max=[0.5, 4.0, 600.0, 300.0], activation_median=[0.25, 0.5, 0.5, 0.5],
    activations_beyond_100=[0.0, 0.0, 2.5, 1.0], activations_beyond_1000=[0.0, 0.0, 1.0, 0.0],
    kurtosis_moment=[3.0, 3.5, 200.0, 150.0], kurtosis_channels=[1.0, 1.5, 9.0, 8.0],
    activation_position=[4, 3, 1, 1], activation_channel=[7, 6, 39, 39],
    hidden_ratio=[9.0, 1.5, 7.0, 5.0], null_p99={'sink_1': 1.5, 'hidden_ratio': 1.25})


def test_a_planted_block_is_read_at_its_number(tmp_path):
  probe = write(tmp_path / 'a', probed=[FLAT[0], probe_row(1200, 45.5, 0.6, **DESCRIBED)]).probe
  assert [block.block for block in probe.activations] == [1, 2, 3]  # without the embedding
  assert probe.first_massive == BlockActivations(
      block=2, max=600.0, median=0.5, beyond_100=2.5, beyond_1000=1.0, kurtosis_moment=200.0,
      kurtosis_channels=9.0, position=1, channel=39)
  assert [block.max_over_median for block in probe.activations] == [8, 1200, 600]


def test_curves_are_of_the_blocks_and_none_where_a_row_has_no_number(tmp_path):
  unmeasured = DESCRIBED | dict(hidden_ratio=[9.0, None, None, None],
                                activation_median=[0.25, 0.0, 0.5, 0.5])
  curves = write(tmp_path / 'a', probed=[
      FLAT[0], probe_row(400, 0.0, 0.1, **unmeasured), probe_row(1200, 0.0, 0.1, **DESCRIBED)
  ]).probe.curves
  # The embedding has the largest ratio of all, and is no block.
  assert curves.hidden_ratio == [None, None, 7.0]
  assert curves.max_over_median == [None, 1200, 1200]
  assert curves.value_ratio == [0.25, 0.25, 0.25]


def test_nulls_are_of_the_untrained_model_and_of_the_last_row(tmp_path):
  first, last = dict(sink_1=2.0, hidden_ratio=None), dict(sink_1=0.5, hidden_ratio=1.25)
  probed = [probe_row(0, 0.0, 0.1, null_p99=first), probe_row(1200, 0.0, 0.1, null_p99=last)]
  probe = write(tmp_path / 'a', probed=probed).probe
  assert (probe.nulls, probe.last_nulls) == ({'sink_1': 2.0}, last)
  # A record without its beginning says nothing of the untrained model.
  late = write(tmp_path / 'b', probed=[probed[0] | {'step': 400}, probed[1]]).probe
  assert (late.nulls, late.last_nulls) == ({}, last)


def test_rows_of_older_runs_have_no_such_numbers(tmp_path):
  run = write(tmp_path / 'old', probed=GROWING)
  probe = run.probe
  assert list(probe.activations) == [] and probe.first_massive is None
  assert probe.nulls == probe.last_nulls == {} and set(probe.curves.hidden_ratio) == {None}
  assert 'assive' not in sentences(run) and 'median' not in as_text(build([run]))


def test_report_json_has_the_blocks_and_the_nulls(tmp_path):
  record = json.loads(to_json(write(tmp_path / 'a', probed=[
      probe_row(0, 0.0, 0.1, **DESCRIBED | dict(null_p99={'sink_1': 3.0})),
      probe_row(1200, 0.0, 0.1, **DESCRIBED)])))['probe']
  assert record['nulls'] == {'sink_1': 3.0}
  assert record['last_nulls'] == DESCRIBED['null_p99']
  assert record['activations'][1] == {
      'block': 2, 'max': 600.0, 'median': 0.5, 'beyond_100': 2.5, 'beyond_1000': 1.0,
      'kurtosis_moment': 200.0, 'kurtosis_channels': 9.0, 'position': 1, 'channel': 39}
  # What is as long as a sequence or a run stays in its own files.
  assert not {'curves', 'sink'} & record.keys()


def test_what_was_not_finite_is_none_and_the_other_blocks_count(tmp_path):
  broken = DESCRIBED | dict(activation_max=[0.5, 4.0, float('inf'), 300.0],
                            activations_beyond_100=[0.0, 0.0, float('nan'), 1.0],
                            kurtosis_moment=[3.0, None, None, 150.0])
  run = write(tmp_path / 'a', probed=[FLAT[0], probe_row(1200, 0.0, 0.1, **broken)])
  assert run.status == 'done' and run.probe.first_massive.block == 3
  assert [block.max_over_median for block in run.probe.activations] == [8, None, 600]
  assert run.probe.curves.max_over_median[-1] == 600
  assert run.probe.activations[0].kurtosis_moment is None
  json.loads(to_json(run), parse_constant=pytest.fail)


@pytest.mark.parametrize('damage', [
    dict(activation_max=None), dict(activation_channel=[1, 2, 3]), dict(kurtosis_moment=[1.0] * 5),
    dict(activation_median=0.5)])
def test_a_damaged_list_of_blocks_ends_no_report(damage, tmp_path):
  run = write(tmp_path / 'a', probed=[FLAT[0], probe_row(1200, 0.0, 0.1, **DESCRIBED | damage)])
  assert run.status == 'unreadable' and run.probe is None and 'row of the probe' in run.error


def test_the_comparison_says_where_activations_are_massive(tmp_path):
  massive = write(tmp_path / 'massive', probed=[FLAT[0], probe_row(
      1200, 100.0, 0.6, **EXTRA_KEY | DESCRIBED)])
  small = {key: value for key, value in DESCRIBED.items() if key != 'activation_max'}
  calm = write(tmp_path / 'calm', probed=[FLAT[0], probe_row(1200, 0.0, 0.1, **small | dict(
      activation_max=[0.5, 4.0, 6.0, 3.0], activations_beyond_100=[0.0] * 4))])
  old = write(tmp_path / 'old', probed=GROWING)
  ratio, = (column for column in columns([massive, calm, old])
            if column.heading == 'max / median')
  assert ratio.cells == ['1200', '12', '-']
  assert sentences(massive).endswith(
      'Massive activations first appear in block 2: 2.5 entries of the hidden states of a '
      'sequence, on average, exceed 100 medians there, the largest in channel 39 of token 1.')
  assert 'assive' not in sentences(calm) + sentences(old)
  assert max(map(len, as_text(build([massive, calm, old])).splitlines())) <= 100


def test_blocks_without_attention_are_counted_where_a_block_is_named():
  rows = [probe_row(0, 0.0, 0.1, value_ratio=[0.9, 0.25])]
  assert probe_record(rows, [2, 4]).value_ratio_block == 4
