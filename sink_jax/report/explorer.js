// Explores the heads of a sink card: it reads the data of its page, draws two canvases, and fetches nothing.
'use strict';
(async () => {
  const element = (id) => document.getElementById(id);
  // Bytes that the page holds as base64, deflated.
  async function unpacked(id) {
    const bytes = Uint8Array.from(atob(element(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const data = JSON.parse(new TextDecoder().decode(await unpacked('data')));
  let numbers = data.numbers.at(-1); // of all texts, or of the last step of a run
  const [layers, heads] = [numbers.blocks.length, numbers.importance[0].length];
  const tokens = data.texts[0].length;
  const chosen = { k: 0, epsilon: numbers.epsilons.indexOf(0.3), layer: 0, head: 0, token: 0 };
  chosen.text = Math.max(0, data.steps.length - 1); // or the step; -1 for the mean of the texts
  const [LEFT, ABOVE, BELOW, RIGHT] = [40, 6, 34, 4]; // pixels of a canvas around its cells

  // Roots of attention weights: texts or steps, layers, heads, lower triangles by rows.
  const roots = await unpacked('maps');

  // The root of the weight, from 0 to 1, that query i gives key j in the chosen head and text.
  function root(i, j) {
    const of = (text) => {
      const map = (text * layers + chosen.layer) * heads + chosen.head;
      return roots[(map * tokens * (tokens + 1) + i * (i + 1)) / 2 + j] / 255;
    };
    if (chosen.text >= 0) return of(chosen.text);
    const weights = data.texts.map((_, text) => of(text) ** 2);
    return Math.sqrt(weights.reduce((a, b) => a + b) / weights.length);
  }

  const colour = (value) => {
    const last = data.colours.length - 1;
    return data.colours[Math.round(Math.min(1, Math.max(0, value)) * last)];
  };
  const contrast = (value) => (value > 0.55 ? '#000000' : '#ffffff'); // cividis grows lighter
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const importance = (layer, head) => numbers.importance[layer][head][chosen.k];
  const epsilon = () => numbers.epsilons[chosen.epsilon];
  const numbered = (count) => Array.from({ length: count }, (_, n) => n + 1);
  const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));

  function word(token) {
    if (chosen.text < 0) return String(token + 1);
    return data.texts[data.steps.length ? 0 : chosen.text][token].replaceAll('\n', '\u23ce') || '\u2205';
  }

  // A canvas of columns x rows cells in the pixels of the screen; a cell is at least `least` high.
  function prepared(canvas, columns, rows, least) {
    const ratio = window.devicePixelRatio || 1;
    const cell = { width: (canvas.clientWidth - LEFT - RIGHT) / columns };
    cell.height = Math.max(least, Math.min(26, cell.width));
    const height = ABOVE + rows * cell.height + BELOW;
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext('2d');
    context.scale(ratio, ratio);
    context.translate(0, ABOVE);
    Object.assign(context, { font: '11px system-ui, sans-serif', textBaseline: 'middle' });
    return { context, cell };
  }

  // From whole pixel to whole pixel, so that no lines show between cells.
  function fill({ context, cell }, column, row, value) {
    const [left, right] = [column, column + 1].map((n) => Math.round(LEFT + n * cell.width));
    const [top, bottom] = [row, row + 1].map((n) => Math.round(n * cell.height));
    context.fillStyle = colour(value);
    context.fillRect(left, top, right - left, bottom - top);
  }

  // Two lines around cells, dark and light, so that they show on any colour.
  function frame({ context, cell }, column, row, columns, rows) {
    for (const [inset, ink] of [[-3, '#000000'], [-1, '#ffffff']]) {
      context.strokeStyle = ink;
      context.lineWidth = 2;
      const [x, y] = [LEFT + column * cell.width + inset, row * cell.height + inset];
      context.strokeRect(x, y, columns * cell.width - 2 * inset, rows * cell.height - 2 * inset);
    }
  }

  function labels({ context, cell }, across, down, names) {
    const [width, height] = [across.length * cell.width, down.length * cell.height];
    const write = (text, x, y, least, n) => n % least || context.fillText(text, x, y);
    const [every, step] = [Math.ceil(22 / cell.width), Math.ceil(14 / cell.height)];
    Object.assign(context, { fillStyle: style('--ink'), textAlign: 'right' });
    down.forEach((name, n) => write(name, LEFT - 4, (n + 0.5) * cell.height, step, n));
    context.textAlign = 'center';
    across.forEach((name, n) => write(name, LEFT + (n + 0.5) * cell.width, height + 11, every, n));
    context.fillText(names[0], LEFT + width / 2, height + 26);
    context.rotate(-Math.PI / 2); // for the last words on a canvas
    context.fillText(names[1], -height / 2, 7);
  }

  function drawGrid() {
    const view = prepared(element('grid'), layers, heads, 9);
    const { context, cell } = view;
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        const value = importance(layer, head);
        fill(view, layer, head, value);
        if (value <= epsilon()) continue;
        context.fillStyle = contrast(value);
        context.beginPath();
        const [x, y] = [LEFT + (layer + 0.5) * cell.width, (head + 0.5) * cell.height];
        context.arc(x, y, Math.max(1.2, Math.min(cell.width, cell.height) / 6), 0, 7);
        context.fill();
      }
    }
    frame(view, chosen.layer, chosen.head, 1, 1);
    labels(view, numbers.blocks, numbered(heads), ['block', 'head']);
  }

  function drawMap() {
    const view = prepared(element('map'), tokens, tokens, 2);
    for (let i = 0; i < tokens; i++) {
      for (let j = 0; j <= i; j++) fill(view, j, i, root(i, j));
    }
    frame(view, chosen.token, chosen.token, 1, tokens - chosen.token);
    labels(view, numbered(tokens), numbered(tokens), ['key', 'query']);
  }

  function tell() {
    const counting = numbers.importance.flat().filter((of) => of[chosen.k] > epsilon()).length;
    const rate = numbers.sink_rates[chosen.k][chosen.epsilon];
    element('k-value').textContent = chosen.k + 1;
    element('epsilon-value').textContent = epsilon();
    if (data.steps.length) element('step-value').textContent = data.steps[chosen.text];
    element('rate').textContent =
      `Sink_${chosen.k + 1} = ${rate} % of pairs of a head and a text at ε = ${epsilon()}; ` +
      `${counting} of ${layers * heads} heads have a mean importance above ε.`;
    const at = (name) => numbers[name][chosen.layer][chosen.head] ?? '-';
    for (const name of ['layer', 'head']) element(name).value = chosen[name];
    const rows = [
      [`importance of token ${chosen.k + 1}`, importance(chosen.layer, chosen.head)],
      ['entropy, as a share of uniform attention', at('entropy')],
      ['value norm of token 1, over that of others', at('value_ratio')],
      ['key norm of token 1, over that of others', at('key_ratio')],
      ['distance with 95 % of the attention, tokens', at('distance')],
    ];
    const table = document.createElement('table');
    for (const words of rows) {
      const row = table.insertRow();
      for (const word of words) row.insertCell().textContent = word;
    }
    element('numbers').replaceChildren(table);
  }

  function tellTokens() {
    const later = [...Array(tokens).keys()].slice(chosen.token + 1);
    later.sort((a, b) => root(b, chosen.token) - root(a, chosen.token));
    const name = (i) => (chosen.text < 0 ? i + 1 : `${i + 1} \u201c${word(i)}\u201d`);
    const most = later.length ? later.slice(0, 3).map(name).join(', ') : 'no later token';
    element('attends').textContent = `Token ${name(chosen.token)} gets most attention from ${most}.`;
    [...element('tokens').children].forEach((button, token) => {
      const value = token < chosen.token ? null : root(token, chosen.token);
      button.textContent = word(token);
      button.style.background = value === null ? 'none' : colour(value);
      button.style.color = value === null ? style('--ink') : contrast(value);
      button.setAttribute('aria-pressed', token === chosen.token);
    });
  }

  function choose(changes) {
    Object.assign(chosen, changes);
    if (data.steps.length) numbers = data.numbers[chosen.text];
    drawGrid();
    drawMap();
    element('bar').querySelector('i').style.left = `${100 * epsilon()}%`;
    tell();
    tellTokens();
  }

  // Calls act(column, row) for a click or a touch on a cell of a canvas, move(x, y) for an arrow key.
  function onCell(canvas, columns, rows, act, move) {
    canvas.addEventListener('click', (event) => {
      const box = canvas.getBoundingClientRect();
      const [width, height] = [box.width - LEFT - RIGHT, box.height - ABOVE - BELOW];
      const column = ((event.clientX - box.left - LEFT) / width) * columns;
      const row = ((event.clientY - box.top - ABOVE) / height) * rows;
      act(clamp(Math.floor(column), columns), clamp(Math.floor(row), rows));
    });
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    canvas.addEventListener('keydown', (event) => {
      if (!steps[event.key]) return;
      event.preventDefault();
      move(...steps[event.key]);
    });
  }

  // Sorts a table by a column, by numbers where cells begin with one; others come last.
  function sort(header) {
    const table = header.closest('table');
    const column = header.cellIndex;
    const down = header.getAttribute('aria-sort') !== 'descending';
    const word = (row) => row.cells[column].textContent;
    const number = (row) => Number.parseFloat(word(row).replaceAll(',', ''));
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [number(a), number(b)];
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      const order = Number.isNaN(x) ? word(a).localeCompare(word(b), 'en', { numeric: true }) : x - y;
      return down ? -order : order;
    });
    for (const other of table.querySelectorAll('th')) other.setAttribute('aria-sort', 'none');
    header.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    table.tBodies[0].append(...rows);
  }

  // Calls act with the number of a slider, or with the place of the chosen one of `words`.
  function control(name, act, words = []) {
    element(name).append(...words.map((word, n) => new Option(word, n)));
    element(name).addEventListener('input', (event) => act(Number(event.target.value)));
  }

  element('bar').style.background = `linear-gradient(to right, ${data.colours.join(', ')})`;
  element('k').max = numbers.importance[0][0].length;
  element('epsilon').max = numbers.epsilons.length - 1;
  element('epsilon').value = chosen.epsilon;
  element('step').max = element('step').value = data.steps.length - 1;
  element(data.steps.length ? 'text' : 'step').parentElement.hidden = true;
  control('k', (k) => choose({ k: k - 1 }));
  control('epsilon', (epsilon) => choose({ epsilon }));
  control('step', (text) => choose({ text }));
  control('layer', (layer) => choose({ layer }), numbers.blocks);
  control('head', (head) => choose({ head }), numbered(heads));
  control('text', (text) => choose({ text }), numbered(data.texts.length));
  element('text').append(new Option(`mean of ${data.texts.length}`, -1));
  onCell(element('grid'), layers, heads, (layer, head) => choose({ layer, head }), (x, y) =>
    choose({ layer: clamp(chosen.layer + x, layers), head: clamp(chosen.head + y, heads) }));
  onCell(element('map'), tokens, tokens, (token) => choose({ token }), (x, y) =>
    choose({ token: clamp(chosen.token + (x || y), tokens) }));
  for (let token = 0; token < tokens; token++) {
    const button = document.createElement('button');
    button.addEventListener('click', () => choose({ token }));
    element('tokens').append(button);
  }
  for (const header of document.querySelectorAll('thead th')) {
    const button = document.createElement('button');
    button.append(...header.childNodes);
    button.addEventListener('click', () => sort(header));
    header.append(button);
    header.setAttribute('aria-sort', 'none');
  }
  const first = numbers.importance.flat().map((of) => of[0]);
  const largest = first.indexOf(Math.max(...first));
  choose({ layer: Math.floor(largest / heads), head: largest % heads });
  window.addEventListener('resize', () => choose({}));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => choose({}));
})();
