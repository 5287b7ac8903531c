// Chat and monitor. Everything that is kept is kept in the browser; everything that is shown as text is set as text.
'use strict';

const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === 'text') element.textContent = value;
    else if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};

// What is kept.

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
const load = (key, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem('spillgate.' + key)) ?? otherwise;
  } catch {
    return otherwise;
  }
};
const save = (key, value) => {
  try {
    localStorage.setItem('spillgate.' + key, JSON.stringify(value));
  } catch {
    notice('The browser keeps nothing more: delete some conversations.');
  }
};

let settings = load('settings', {});
let conversations = load('conversations', []);
let current = null;
let running = null;

const notice = (text) => {
  $('notice').textContent = text;
  $('notice').hidden = !text;
};

const ask = (path, body, signal) => {
  const headers = {};
  if (settings.key) headers.Authorization = 'Bearer ' + settings.key;
  if (body) headers['Content-Type'] = 'application/json';
  return fetch(path, { method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal });
};

const problem = async (response) => {
  let message = response.status + ' ' + response.statusText;
  try {
    message = (await response.json()).error.message;
  } catch { /* the status says it */ }
  if (response.status === 401) message = 'The server wants a key: it can be set in the settings.';
  return new Error(message);
};

// Conversations.

const title = (conversation) => conversation.messages.find((m) => m.role === 'user')?.content.slice(0, 60) || 'New conversation';

const keep = () => save('conversations', conversations.filter((c) => c.messages.length > 0).slice(0, 100));

const select = (conversation) => {
  stop();
  current = conversation;
  document.body.dataset.menu = '';
  $('menu').setAttribute('aria-expanded', 'false');
  show();
};

const begin = () => {
  const empty = conversations.find((c) => c.messages.length === 0);
  if (empty) return select(empty);
  const conversation = { id: crypto.randomUUID?.() ?? String(Math.random()), messages: [] };
  conversations.unshift(conversation);
  select(conversation);
};

const remove = (conversation) => {
  conversations = conversations.filter((c) => c !== conversation);
  keep();
  if (conversation === current) begin();
  else showList();
};

const showList = () => {
  $('conversations').replaceChildren(...conversations.map((conversation) => make('li', { 'aria-current': String(conversation === current) },
    make('button', { text: title(conversation), onclick: () => select(conversation) }),
    make('button', { text: '×', 'aria-label': 'Delete: ' + title(conversation), onclick: () => remove(conversation) }))));
};

// Text, with fenced code set apart.
const write = (element, text) => {
  const parts = text.split(/^```[^\n]*\n?/m);
  element.replaceChildren(...parts.map((part, i) => i % 2
    ? make('pre', {}, make('code', { text: part.replace(/\n$/, '') }))
    : document.createTextNode(part)));
};

const messageElement = (message, index) => {
  const element = make('div', { class: 'message ' + (message.error ? 'error' : message.role) });
  if (message.reasoning) {
    element.append(make('details', {}, make('summary', { text: 'Reasoning' }), make('div', { text: message.reasoning })));
  }
  const text = make('div', { class: 'text' });
  write(text, message.error ?? message.content);
  element.append(text);
  if (message.role === 'assistant' && !running) {
    const tools = make('div', { class: 'tools' },
      make('button', { class: 'plain', text: 'Copy', onclick: () => navigator.clipboard?.writeText(message.content) }));
    if (index === current.messages.length - 1) {
      tools.append(make('button', { class: 'plain', text: 'Regenerate', onclick: regenerate }));
    }
    element.append(tools);
  }
  return element;
};

const show = () => {
  showList();
  const log = $('log');
  log.replaceChildren(...current.messages.map(messageElement));
  if (current.messages.length === 0) log.append(make('p', { class: 'empty', text: 'Ask something.' }));
  log.scrollTop = log.scrollHeight;
  $('send').hidden = Boolean(running);
  $('stop').hidden = !running;
};

const regenerate = () => {
  if (running) return;
  current.messages.pop();
  answer();
};

const stop = () => running?.abort();

const request = () => {
  const messages = current.messages.filter((m) => !m.error).map(({ role, content }) => ({ role, content }));
  if (settings.system) messages.unshift({ role: 'system', content: settings.system });
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  for (const key of NUMBERS) if (settings[key] !== undefined) body[key] = settings[key];
  return body;
};

// The data of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split('\n');
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith('data: ') && line !== 'data: [DONE]') yield JSON.parse(line.slice(6));
    }
  }
}

const answer = async () => {
  const conversation = current;
  const body = request();
  const message = { role: 'assistant', content: '' };
  conversation.messages.push(message);
  const controller = new AbortController();
  running = controller;
  show();
  const log = $('log');
  const redraw = () => {
    if (conversation !== current) return;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const open = log.lastElementChild?.querySelector('details')?.open;
    log.lastElementChild?.replaceWith(messageElement(message, -1));
    const details = log.lastElementChild?.querySelector('details');
    if (details) details.open = open ?? true;
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  const begun = performance.now();
  let first = null;
  let tokens = 0;
  let usage = null;
  let frame = 0;
  try {
    const response = await ask('v1/chat/completions', body, controller.signal);
    if (!response.ok) throw await problem(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const delta = event.choices[0]?.delta;
      const text = delta?.content ?? '';
      const thought = delta?.reasoning_content ?? '';
      if (!text && !thought) continue;
      first ??= performance.now();
      tokens += 1;
      message.content += text;
      if (thought) message.reasoning = (message.reasoning ?? '') + thought;
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(redraw);
    }
  } catch (error) {
    if (error.name !== 'AbortError') message.error = error.message;
  }
  cancelAnimationFrame(frame);
  running = null;
  if (!message.content && !message.reasoning && !message.error) conversation.messages.pop();
  keep();
  if (conversation === current) show();
  if (first) {
    const count = usage?.completion_tokens ?? tokens;
    const seconds = (performance.now() - first) / 1000;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    $('stats').textContent = [
      `first token ${((first - begun) / 1000).toFixed(2)} s`,
      `${count} tokens`,
      count > 1 ? `${((count - 1) / seconds).toFixed(1)} tok/s` : '',
      usage ? `prompt ${usage.prompt_tokens}${cached ? `, ${cached} of it there from before` : ''}` : '',
    ].filter(Boolean).join(' · ');
  }
  $('input').focus();
};

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  const text = $('input').value.trim();
  if (!text || running) return;
  $('input').value = '';
  resize();
  if (current.messages.at(-1)?.error) current.messages.pop();
  current.messages.push({ role: 'user', content: text });
  keep();
  answer();
});

const resize = () => {
  $('input').style.height = 'auto';
  $('input').style.height = $('input').scrollHeight + 2 + 'px';
};
$('input').addEventListener('input', resize);
$('input').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $('composer').requestSubmit();
  }
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') stop();
  if (event.altKey && event.key.toLowerCase() === 'n') {
    event.preventDefault();
    view('chat');
    begin();
    $('input').focus();
  }
});
$('stop').addEventListener('click', stop);
$('new').addEventListener('click', () => { begin(); $('input').focus(); });
$('clear').addEventListener('click', () => {
  if (!confirm('Delete all conversations?')) return;
  conversations = [];
  keep();
  begin();
});
$('menu').addEventListener('click', () => {
  const open = document.body.dataset.menu !== 'open';
  document.body.dataset.menu = open ? 'open' : '';
  $('menu').setAttribute('aria-expanded', String(open));
});

// Settings.

$('settings-open').addEventListener('click', () => {
  for (const key of ['system', 'key', ...NUMBERS]) $('set-' + key).value = settings[key] ?? '';
  $('settings').showModal();
});
$('settings-reset').addEventListener('click', () => {
  for (const key of ['system', ...NUMBERS]) $('set-' + key).value = '';
});
$('settings').addEventListener('close', () => {
  settings = {};
  for (const key of ['system', 'key']) if ($('set-' + key).value) settings[key] = $('set-' + key).value;
  for (const key of NUMBERS) if ($('set-' + key).value !== '') settings[key] = Number($('set-' + key).value);
  save('settings', settings);
  start();
});

const THEMES = { auto: 'as the system has them', light: 'light', dark: 'dark' };
let theme = load('theme', 'auto');
const applyTheme = () => {
  document.documentElement.dataset.theme = theme;
  $('theme').setAttribute('aria-label', 'Colours: ' + THEMES[theme]);
  $('theme').title = 'Colours: ' + THEMES[theme];
};
$('theme').addEventListener('click', () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  save('theme', theme);
  applyTheme();
});

// Views.

const view = (name) => {
  document.body.dataset.view = name;
  for (const other of ['chat', 'monitor']) {
    $(other).hidden = other !== name;
    $('tab-' + other).setAttribute('aria-selected', String(other === name));
  }
  history.replaceState(null, '', name === 'chat' ? location.pathname : '#monitor');
  if (name === 'monitor') poll();
};
for (const name of ['chat', 'monitor']) $('tab-' + name).addEventListener('click', () => view(name));

// Monitor.

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
const size = (bytes) => {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) { bytes /= 1024; unit += 1; }
  return (unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)) + ' ' + UNITS[unit];
};
const list = (element, pairs) => element.replaceChildren(...pairs.flatMap(([name, value]) => [
  make('dt', { text: name }), make('dd', { text: String(value) })]));

const bar = (name, total, parts) => {
  const seen = parts.filter((part) => part.bytes > 0);
  const used = seen.reduce((sum, part) => sum + part.bytes, 0);
  const all = Math.max(total, used);
  if (all > used) seen.push({ name: 'free', bytes: all - used, colour: 'free' });
  const label = `${name}: ` + seen.map((p) => `${p.name} ${size(p.bytes)}`).join(', ');
  return [
    make('div', { text: `${name}, ${size(all)}` }),
    make('div', { class: 'bar', role: 'img', 'aria-label': label }, ...seen.map((part) => {
      const piece = make('i', { title: `${part.name}: ${size(part.bytes)}` });
      piece.style.flexGrow = part.bytes / all;
      piece.style.background = `var(--${part.colour})`;
      return piece;
    })),
    make('ul', { class: 'legend' }, ...seen.map((part) => {
      const dot = make('i');
      dot.style.background = `var(--${part.colour})`;
      return make('li', {}, dot, `${part.name} ${size(part.bytes)}`);
    })),
  ];
};

const COLOURS = [['expert', 'experts'], ['weight', 'weights'], ['staging', 'staging'], ['work', 'work'], ['KV', 'kv'], ['reserve', 'free']];
const colour = (what) => COLOURS.find(([word]) => what.includes(word))?.[1] ?? 'work';

// Planned parts, the cache's as it is filled now.
const parts = (planned, used, name) => {
  const others = planned.filter((part) => !part.what.startsWith('KV')).map((part) => ({ name: part.what, bytes: part.bytes, colour: colour(part.what) }));
  const kv = planned.filter((part) => part.what.startsWith('KV')).reduce((sum, part) => sum + part.bytes, 0);
  others.push({ name, bytes: used, colour: 'kv' });
  others.push({ name: 'room for more of it', bytes: Math.max(0, kv - used), colour: 'kv-free' });
  return others;
};

let plan = null;
let before = null;
let rates = [];
let timer = 0;

const showPlan = () => {
  $('reason').textContent = plan.reason ?? '';
  const predicted = plan.predicted ?? [];
  $('predicted').textContent = predicted.length
    ? 'predicted for one alone: ' + predicted.map((p) => `${p.tok_s.toFixed(1)} at ${p.depth}`).join(', ') : '';
  const head = make('tr', {}, ...['keys/values', 'size', 'spill', 'tok/s', 'fits'].map((text) => make('th', { text })));
  const rows = (plan.tiers ?? []).map((tier) => {
    const name = `${tier.type_k}/${tier.type_v}`;
    const cells = [name, size(tier.kv_bytes), size(tier.spill_bytes), tier.tok_s?.toFixed(1) ?? '–', tier.fits ? 'yes' : 'no'];
    return make('tr', { class: name === plan.choice ? 'chosen' : '' }, ...cells.map((text) => make('td', { text })));
  });
  $('tiers').replaceChildren(head, ...rows);
};

const showStatus = (status) => {
  $('model').textContent = status.model;
  const now = performance.now() / 1000;
  if (before) {
    const seconds = now - before.at;
    const of = (key) => (status.tokens[key] - before.status.tokens[key]) / seconds;
    rates.push(of('generated'));
    rates = rates.slice(-120);
    $('rate').textContent = rates.at(-1).toFixed(1);
    const most = Math.max(1, ...rates);
    const xOf = (i) => (i + 120 - rates.length) * 240 / 119;
    const points = rates.map((rate, i) => `${xOf(i)},${46 - 44 * rate / most}`).join(' ');
    const shape = (name, points) => {
      const element = document.createElementNS('http://www.w3.org/2000/svg', name);
      element.setAttribute('points', points);
      return element;
    };
    $('spark').replaceChildren(shape('polygon', `${xOf(0)},48 ${points} 240,48`), shape('polyline', points));
    const cpu = status.cpu_s === null ? null : (status.cpu_s - before.status.cpu_s) / seconds;
    const link = (status.kv.streamed_bytes - before.status.kv.streamed_bytes) / seconds;
    const linkMost = plan?.rates?.bw_eff_gb_s;
    const { decoded, decode_s: decode } = status.tokens;
    $('measured').textContent = decode > 0 ? `measured for each answer so far: ${(decoded / decode).toFixed(1)}` : '';
    list($('machine'), [
      ['prompt tokens a second', of('prompt').toFixed(1)],
      ...(plan?.layout?.host_bytes > 0 && linkMost ? [['link to fast memory', `${(link / 1e9).toFixed(2)} of ${linkMost.toFixed(1)} GB/s`]] : []),
      ...(cpu === null ? [] : [['processors in use', `${cpu.toFixed(1)} of ${status.threads}`]]),
      ...(status.resident_bytes === null ? [] : [['resident memory', size(status.resident_bytes)]]),
      ['context', `${status.n_ctx} tokens`],
      ['up', `${Math.round(status.uptime_s / 60)} min`],
    ]);
  }
  before = { at: now, status };
  const { requests, kv, gate } = status;
  list($('requests'), [
    ['in work', `${requests.running} of ${requests.parallel}`], ['waiting', requests.waiting], ['answered', requests.done],
    ['left or ended early', requests.ended_early], ['beginnings kept', requests.kept], ['tokens generated', status.tokens.generated],
    ['prompt tokens not computed again', status.tokens.cached],
  ]);
  if (plan?.layout) {
    const { layout, memory } = plan;
    const fast = memory?.place === 'device' ? 'Device memory' : 'Fast memory';
    // Where main memory is all there is, what is free of it says little, and would hide the rest.
    const total = memory?.place === 'host' ? layout.fast_bytes : memory?.fast_bytes ?? layout.fast_bytes;
    const children = bar(fast, total, parts(layout.fast, kv.device_bytes, 'KV in use'));
    if (layout.host_bytes > 0) {
      children.push(...bar('Host memory', layout.host_bytes, parts(layout.host, kv.host_bytes, 'KV tail in use')));
    }
    $('memory').replaceChildren(...children);
  }
  if (gate) {
    list($('gate'), [
      ['share now', gate.share.toFixed(2)],
      ['verdict', gate.verdict === null ? 'measuring' : gate.verdict.shares ? 'worth having' : 'not worth having'],
      ...(gate.verdict ? [['best share', gate.verdict.amount.toFixed(2)]] : []),
      ...(gate.ratios?.length ? [['time with it over without', gate.ratios.slice(-4).map((r) => r.toFixed(2)).join(', ')]] : []),
    ]);
    $('gate-note').textContent = 'The CPU attends this part of the cells in host memory, if that is faster than to copy them.';
  } else {
    list($('gate'), []);
    $('gate-note').textContent = 'All cells are in fast memory: there is nothing to share.';
  }
};

const poll = async () => {
  clearTimeout(timer);
  try {
    if (!plan) {
      const response = await ask('v1/plan');
      if (!response.ok) throw await problem(response);
      plan = await response.json();
      showPlan();
    }
    const response = await ask('v1/status');
    if (!response.ok) throw await problem(response);
    showStatus(await response.json());
    notice('');
  } catch (error) {
    notice(error instanceof TypeError ? 'The server does not answer.' : error.message);
  }
  const isSeen = document.body.dataset.view === 'monitor' && !document.hidden;
  timer = setTimeout(poll, isSeen ? 1000 : 10000);
};

const start = () => {
  plan = null;
  before = null;
  poll();
};

applyTheme();
begin();
view(location.hash === '#monitor' ? 'monitor' : 'chat');
start();
$('input').focus();
