// Explores the heads of a sink card: it reads the JSON of its page, draws two canvases, and fetches nothing.
'use strict';
(async () => {
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element('data').textContent);
  let numbers = data.numbers.at(-1); // of all texts, or of the last step of a run
  const [layers, heads] = [numbers.blocks.length, numbers.importance[0].length];
  const tokens = data.texts[0].length;
  const chosen = { k: 0, epsilon: numbers.epsilons.indexOf(0.3), layer: 0, head: 0, token: 0 };
  chosen.text = data.steps.length - 1; // or the step; -1 for the mean of the texts
  const [LEFT, ABOVE, BELOW] = [26, 6, 18]; // pixels of a canvas around its cells, for numbers

  // Roots of attention weights as bytes: texts or steps, layers, heads, lower triangles by rows.
  async function unpacked(text) {
    const stream = new DecompressionStream('deflate');
    const writer = stream.writable.getWriter();
    writer.write(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
    writer.close();
    return new Uint8Array(await new Response(stream.readable).arrayBuffer());
  }
  const roots = await unpacked(data.maps);

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
  const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));

  function word(token) {
    if (chosen.text < 0) return String(token + 1);
    return data.texts[data.steps.length ? 0 : chosen.text][token].replaceAll('\n', '\u23ce') || '\u2205';
  }

  // A canvas of columns x rows cells in the pixels of the screen; a cell is at least `least` high.
  function prepared(canvas, columns, rows, least) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const cell = { width: (width - LEFT) / columns };
    cell.height = Math.max(least, Math.min(26, cell.width));
    const height = ABOVE + rows * cell.height + BELOW;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext('2d');
    context.scale(ratio, ratio);
    context.translate(0, ABOVE);
    Object.assign(context, { font: '11px system-ui, sans-serif', textBaseline: 'middle' });
    return { context, cell };
  }

  function fill({ context, cell }, column, row, value) {
    context.fillStyle = colour(value);
    context.fillRect(LEFT + column * cell.width, row * cell.height, cell.width + 0.4, cell.height + 0.4);
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

  function labels({ context, cell }, across, down) {
    const [rows, step] = [down.length, Math.ceil(14 / cell.height)];
    context.fillStyle = style('--ink');
    const every = Math.ceil(22 / cell.width);
    context.textAlign = 'center';
    across.forEach((name, n) => {
      if (n % every === 0) context.fillText(name, LEFT + (n + 0.5) * cell.width, rows * cell.height + 11);
    });
    context.textAlign = 'right';
    down.forEach((name, n) => {
      if (n % step === 0) context.fillText(name, LEFT - 4, (n + 0.5) * cell.height);
    });
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
    labels(view, numbers.blocks, numbers.importance[0].map((_, head) => head + 1));
    frame(view, chosen.layer, chosen.head, 1, 1);
  }

  function drawMap() {
    const positions = Array.from({ length: tokens }, (_, token) => token + 1);
    const view = prepared(element('map'), tokens, tokens, 2);
    for (let i = 0; i < tokens; i++) {
      for (let j = 0; j <= i; j++) fill(view, j, i, root(i, j));
    }
    labels(view, positions, positions);
    frame(view, chosen.token, chosen.token, 1, tokens - chosen.token);
  }

  function tell() {
    const counting = numbers.importance.flat().filter((of) => of[chosen.k] > epsilon()).length;
    const rate = numbers.sink_rates[chosen.k][chosen.epsilon];
    element('k-value').textContent = chosen.k + 1;
    element('epsilon-value').textContent = epsilon();
    const step = data.steps.length ? `Step ${data.steps[chosen.text]}: ` : '';
    element('rate').textContent =
      `${step}Sink_${chosen.k + 1} = ${rate} % of pairs of a head and a text at ε = ${epsilon()}; ` +
      `${counting} of ${layers * heads} heads have a mean importance above ε.`;
    const at = (name) => numbers[name][chosen.layer][chosen.head] ?? '-';
    const rows = [
      ['block', numbers.blocks[chosen.layer]],
      ['head', chosen.head + 1],
      [`importance of token ${chosen.k + 1}`, importance(chosen.layer, chosen.head)],
      ['entropy, of uniform', at('entropy')],
      ['value norm, first to others', at('value_ratio')],
      ['key norm, first to others', at('key_ratio')],
      ['distance that keeps 95 %', at('distance')],
    ];
    const table = document.createElement('table');
    for (const [name, value] of rows) {
      const row = table.insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = value;
    }
    element('numbers').replaceChildren(table);
  }

  function tellTokens() {
    const later = Array.from({ length: tokens }, (_, i) => i).slice(chosen.token + 1);
    later.sort((a, b) => root(b, chosen.token) - root(a, chosen.token));
    const name = (i) => (chosen.text < 0 ? i + 1 : `${i + 1} "${word(i)}"`);
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
    drawGrid();
    drawMap();
    element('bar').querySelector('i').style.left = `${100 * epsilon()}%`;
    tell();
    tellTokens();
  }

  // Calls act(column, row) for a click or a touch on a cell of a canvas.
  function onCell(canvas, columns, rows, act) {
    canvas.addEventListener('click', (event) => {
      const box = canvas.getBoundingClientRect();
      const column = ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * columns;
      const height = box.height - ABOVE - BELOW;
      const row = ((event.clientY - box.top - ABOVE) / height) * rows;
      act(clamp(Math.floor(column), columns), clamp(Math.floor(row), rows));
    });
  }

  function onArrows(canvas, act) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    canvas.addEventListener('keydown', (event) => {
      if (!steps[event.key]) return;
      event.preventDefault();
      act(...steps[event.key]);
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
      const order = Number.isNaN(x) ? word(a).localeCompare(word(b)) : x - y;
      return down ? -order : order;
    });
    for (const other of table.querySelectorAll('th')) other.setAttribute('aria-sort', 'none');
    header.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    table.tBodies[0].append(...rows);
  }

  element('bar').style.background = `linear-gradient(to right, ${data.colours.join(', ')})`;
  element('k').max = numbers.importance[0][0].length;
  element('k').addEventListener('input', (event) => choose({ k: event.target.value - 1 }));
  element('epsilon').max = numbers.epsilons.length - 1;
  element('epsilon').value = chosen.epsilon;
  element('epsilon').addEventListener('input', (event) => choose({ epsilon: Number(event.target.value) }));
  const options = data.texts.map((_, text) => new Option(text + 1, text));
  element('text').append(new Option('mean', -1), ...options);
  element('text').addEventListener('change', (event) => choose({ text: Number(event.target.value) }));
  element(data.steps.length ? 'text' : 'step').parentElement.hidden = true;
  element('step').max = element('step').value = data.steps.length - 1;
  element('step').addEventListener('input', (event) => {
    numbers = data.numbers[event.target.value];
    choose({ text: Number(event.target.value) });
  });
  onCell(element('grid'), layers, heads, (layer, head) => choose({ layer, head }));
  onArrows(element('grid'), (x, y) =>
    choose({ layer: clamp(chosen.layer + x, layers), head: clamp(chosen.head + y, heads) }));
  onCell(element('map'), tokens, tokens, (token) => choose({ token }));
  onArrows(element('map'), (x, y) => choose({ token: clamp(chosen.token + (x || y), tokens) }));
  for (let token = 0; token < tokens; token++) {
    const button = document.createElement('button');
    button.addEventListener('click', () => choose({ token }));
    element('tokens').append(button);
  }
  for (const header of document.querySelectorAll('thead th')) {
    header.tabIndex = 0;
    header.setAttribute('aria-sort', 'none');
    header.addEventListener('click', () => sort(header));
    header.addEventListener('keydown', (event) => event.key === 'Enter' && sort(header));
  }
  const first = numbers.importance.flat().map((of) => of[0]);
  const largest = first.indexOf(Math.max(...first));
  choose({ layer: Math.floor(largest / heads), head: largest % heads });
  window.addEventListener('resize', () => choose({}));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => choose({}));
})();
