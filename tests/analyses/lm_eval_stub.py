"""What the model uses of lm_eval, for environments without it, where it is tested as well.

`test_the_stub_is_as_the_harness` compares signatures and windows wherever lm_eval is installed.
"""

import sys
import types


class TemplateLM:
  """Encodes contexts and endings, and leaves their scores to the subclass."""

  @property
  def prefix_token_id(self):
    return self.eot_token_id

  def loglikelihood(self, requests, disable_tqdm=False):
    asked = []
    for context, continuation in (request.args for request in requests):
      if context:
        ids = self._encode_pair(context, continuation)
      else:
        ids = [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)
      asked.append(((context, continuation), *ids))
    return self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)

  def _encode_pair(self, context, continuation):
    bare = context.rstrip()  # its spaces belong to the continuation
    whole, before = self.tok_encode(context + continuation), self.tok_encode(bare)
    return before, whole[len(before):]


def get_rolling_token_windows(token_list, prefix_token, max_seq_len, context_len):
  assert context_len == 1, 'the adapter asks for nothing else'
  text = [prefix_token, *token_list]
  for start in range(0, len(token_list), max_seq_len):
    end = min(start + max_seq_len, len(token_list))
    first = max(0, end - max_seq_len)
    yield text[first:end], token_list[start:end]


def make_disjoint_window(pair):
  inputs, targets = pair
  return inputs[:len(inputs) - len(targets) + 1], targets


def normalize_gen_kwargs(arguments, tokens):
  until = arguments.get('until', [])
  return {'do_sample': False} | arguments | {
      'until': until if isinstance(until, list) else [until], 'max_gen_toks': arguments.get('max_gen_toks', tokens)}


def install():
  """Puts the stub in the place of lm_eval."""
  parts = {'lm_eval': {}, 'lm_eval.api': {}, 'lm_eval.models': {}, 'lm_eval.api.model': {'TemplateLM': TemplateLM},
           'lm_eval.api.registry': {'register_model': lambda name: lambda model: model},
           'lm_eval.models.utils': {'normalize_gen_kwargs': normalize_gen_kwargs},
           'lm_eval.utils': {'get_rolling_token_windows': get_rolling_token_windows,
                             'make_disjoint_window': make_disjoint_window}}
  for name, content in parts.items():
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
