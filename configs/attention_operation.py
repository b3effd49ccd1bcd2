"""Attention operations (Section 7.4, Tables 6 and 15, Figure 8); softmax is the default."""

from ml_collections import ConfigDict

from configs import budget


def _operation(similarity: str = 'Linear()', normalizer: str = 'Unnormalized()',
               feature_map: str = 'Identity()') -> dict[str, str]:
  return {'attention.similarity': similarity, 'attention.normalizer': normalizer,
          'attention.feature_map': feature_map}


_ROW_SUM, _ABS_FLOOR = 'RowSum(eps=1e-08)', 'AbsFloor(floor=1.0)'
TRIALS = {
    'sigmoid': _operation('Sigmoid()'),
    'sigmoid-normalized': _operation('Sigmoid()', _ROW_SUM),
    'elu': _operation('EluPlusOne()'),
    'elu-normalized': _operation('EluPlusOne()', _ROW_SUM),
    'elu-kernel': _operation(feature_map='EluPlusOne()'),
    'elu-kernel-normalized': _operation('Linear()', _ROW_SUM, 'EluPlusOne()'),
    'identity': _operation(),
    'identity-normalized': _operation('Linear()', _ABS_FLOOR),
    'mlp': _operation(feature_map='Mlp()'),
    'mlp-normalized': _operation('Linear()', _ABS_FLOOR, 'Mlp()'),
}


def get_config(argument: str = '') -> ConfigDict:
  return budget.config(TRIALS, argument)
