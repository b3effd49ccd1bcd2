"""Reports as Markdown and as pages: names are words in both, whatever stands in them."""

import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from sink_jax.io.terminal import text_table
from sink_jax.report.markup import bold, code, line, link
from sink_jax.report.parts import Parts

# The tags that a page of these parts has, whatever the names in it are.
TAGS = {'h1', 'h2', 'p', 'ul', 'li', 'strong', 'code', 'pre', 'div', 'table', 'thead', 'tbody',
        'tr', 'th', 'td', 'em', 'figure', 'img', 'figcaption', 'details', 'summary', 'a'}
PIXEL = io.BytesIO()
Image.new('L', (1, 1)).save(PIXEL, 'png')


class Elements(HTMLParser):
  """The tags of a page's body, its links, and the text of each element."""

  def __init__(self, page):
    super().__init__()
    self.tags, self.links, self.ids, self.words = [], [], [], ''
    self.feed(page.partition('<main>')[2].partition('</main>')[0])

  def handle_starttag(self, tag, attributes):
    self.tags.append(tag)
    attributes = dict(attributes)
    self.links += [attributes[key] for key in ('href', 'src') if key in attributes]
    self.ids += [attributes['id']] if 'id' in attributes else []
    assert not {key for key in attributes if key.startswith('on')}

  def handle_data(self, data):
    # The line that folds is not Markdown, and has no letters that HTML needs.
    self.words += data if self.tags[-1:] != ['summary'] else ''


def report(name, code=code):
  page = Parts(f'About {name}')
  page.heading(name)
  page.paragraph(name)
  page.items([name, line(bold(name), ': ', code(name)), link('there', name)])
  page.code(name if code(name) else '')
  page.table([name, 'share'], [[name, ('1.0', name)], [name, name]])
  page.picture('a.png', PIXEL.getvalue(), f'{name}. And more')
  with page.details(name):
    page.paragraph(f'inside {name}')
  return page


@pytest.mark.parametrize('name', [
    '<script>alert(1)</script>', '|', '![x](y)', '[a](javascript:alert(1))', '</details>',
    '<details><summary>', '# heading', '- item', '1. item', '> said', '```', '~~~', '---', '`',
    '``x`', '*bold* _it_', '&lt;b&gt; &#60;', '<!-- -->', 'a\\', '\\|', '<http://x.y>', '    x',
    'a\n\n<script>', "<img src=x onerror='x()'>", '+', '=', '-', '2)'])
def test_a_name_is_words_in_every_part(name):
  page = report(name)
  elements, plain = Elements(page.html()), Elements(report('plain').html())
  # The same elements as with any other name: none is begun or ended by it.
  assert elements.tags == plain.tags and set(elements.tags) == TAGS
  assert all(re.match(r'#|data:image/webp;base64,', to) for to in elements.links)
  shown, expected = (' '.join(words.split()) for words in (
      elements.words, plain.words.replace('plain', ' '.join(name.split()))))
  assert shown == expected
  # Markdown that is shown by others has no raw HTML but that of the details.
  raw = re.findall(r'<[^ >]*', re.sub(r'\\.', '', report(name, code=lambda name: '').markdown()))
  assert raw == ['<details', '<summary', '</summary', '</details']


def test_a_page_has_anchors_subscripts_and_heads_of_rows():
  page = Parts('Title')
  page.paragraph(link('to it', 'Sink_1 of `a`'))
  page.heading('Sink_1 of `a`')
  page.heading('Sink_1 of `a`')
  page.table(['name', 'share'], [['a', '12 %']])
  page.picture('a.png', PIXEL.getvalue(), 'Sink_* over steps. All seeds.')
  source = page.html()
  assert 'href="#sink_1-of-a"' in source and 'id="sink_1-of-a"' in source
  assert 'id="sink_1-of-a-1"' in source and 'Sink<sub>1</sub> of `a`' in source
  assert '<th scope="row">a</th>' in source and '12&nbsp;%' in source
  assert '<th scope="col">name</th>' in source and source.count('<img') == 1
  assert '<figcaption>Sink<sub>*</sub> over steps. All seeds.</figcaption></figure>' in source
  assert '![Sink\\_\\* over steps](a.png)\n*Sink\\_\\* over steps. All seeds.*' in page.markdown()


def test_a_table_of_a_terminal_wraps_words_and_no_numbers():
  assert text_table(['the run', 'a long heading', 'n'],
                    [['one two three four', '1,234,567', '12'], ['x', 'not yet done', '3']],
                    width=30, wrapped=['not yet done']) == [
      'the run             a long   n', '                   heading',
      '---------------  ---------  --', 'one two three    1,234,567  12', 'four',
      'x                  not yet   3', '                      done']
  plain = text_table(['a', 'b'], [['long name', '1'], ['x', '22']])
  assert plain == ['a           b', '---------  --', 'long name   1', 'x          22']
