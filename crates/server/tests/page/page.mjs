// Drives the page in a headless Chromium over its debugging protocol. Arguments: the server's address, the browser, a folder for screenshots.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const [url, program, folder] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });
const profile = mkdtempSync(join(tmpdir(), 'page-'));
const browser = spawn(program, ['--headless=new', '--no-sandbox', '--disable-gpu', '--remote-debugging-port=0', `--user-data-dir=${profile}`, 'about:blank'],
  { stdio: ['ignore', 'ignore', 'pipe'] });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let passed = 0;
const done = (what) => { passed += 1; console.log('ok', what); };

try {
  const endpoint = await new Promise((resolve, reject) => {
    let text = '';
    browser.stderr.on('data', (data) => {
      text += data;
      const found = text.match(/ws:\/\/[^\s]+/);
      if (found) resolve(found[0]);
    });
    browser.on('exit', () => reject(new Error('the browser ended: ' + text)));
  });
  const targets = await (await fetch(`http://${new URL(endpoint).host}/json`)).json();
  const socket = new WebSocket(targets.find((t) => t.type === 'page').webSocketDebuggerUrl);
  await new Promise((resolve) => socket.addEventListener('open', resolve));
  let last = 0;
  const waiting = new Map();
  const problems = [];
  socket.addEventListener('message', ({ data }) => {
    const message = JSON.parse(data);
    if (message.id) {
      const { resolve, reject } = waiting.get(message.id);
      waiting.delete(message.id);
      message.error ? reject(new Error(message.error.message)) : resolve(message.result);
    } else if (message.method === 'Runtime.exceptionThrown') {
      problems.push(message.params.exceptionDetails.exception?.description ?? message.params.exceptionDetails.text);
    } else if (message.method === 'Log.entryAdded' && message.params.entry.level === 'error') {
      problems.push(message.params.entry.text);
    }
  });
  const call = (method, params = {}) => new Promise((resolve, reject) => {
    const id = ++last;
    waiting.set(id, { resolve, reject });
    socket.send(JSON.stringify({ id, method, params }));
  });
  const run = async (expression) => {
    const { result, exceptionDetails } = await call('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true });
    assert.ok(!exceptionDetails, exceptionDetails?.exception?.description);
    return result.value;
  };
  const until = async (expression, what) => {
    for (let i = 0; i < 600; i++) {
      if (await run(expression)) return;
      await sleep(100);
    }
    assert.fail(`waited for: ${what}`);
  };
  const key = async (name, modifiers = 0, text) => {
    const code = { Enter: 13, Escape: 27 }[name] ?? name.toUpperCase().charCodeAt(0);
    for (const type of ['keyDown', 'keyUp']) {
      await call('Input.dispatchKeyEvent', { type, key: name, windowsVirtualKeyCode: code, modifiers, ...(type === 'keyDown' && text ? { text } : {}) });
    }
  };
  const type = (text) => call('Input.insertText', { text });
  const shot = async (name) => {
    const { data } = await call('Page.captureScreenshot', { format: 'png' });
    writeFileSync(join(folder, name + '.png'), Buffer.from(data, 'base64'));
  };
  const size = (width, height, mobile) => call('Emulation.setDeviceMetricsOverride', { width, height, deviceScaleFactor: mobile ? 2 : 1, mobile });
  const scheme = (value) => call('Emulation.setEmulatedMedia', { features: [{ name: 'prefers-color-scheme', value }] });

  await call('Page.enable');
  await call('Runtime.enable');
  await call('Log.enable');
  await size(1200, 800, false);
  await scheme('light');
  await call('Page.navigate', { url });
  await until("document.readyState === 'complete' && document.getElementById('model').textContent !== ''", 'the page');
  done('the page opens');

  await run("document.getElementById('input').focus()");
  await type('Write two lines about a river, and then a line of code.');
  await key('Enter', 0, '\r');
  await until("document.querySelectorAll('.message.assistant .text')[0]?.textContent.length > 10", 'an answer');
  await until("!document.getElementById('send').hidden && document.getElementById('stats').textContent.includes('tok/s')", 'its end');
  const first = await run("document.querySelector('.message.assistant .text').textContent");
  done('a message is answered, by keyboard alone');

  await run("[...document.querySelectorAll('.message.assistant .tools button')].find((b) => b.textContent === 'Regenerate').click()");
  await until("!document.getElementById('stop').hidden", 'a new answer');
  await until("!document.getElementById('send').hidden", 'its end');
  assert.equal(await run("document.querySelector('.message.assistant .text').textContent"), first, 'at temperature 0 it is the same');
  done('an answer is made again');

  await run("document.getElementById('input').focus()");
  await type('Tell me a very long story about a lock, a gate and a miller.');
  await key('Enter', 0, '\r');
  await until("(document.querySelectorAll('.message.assistant .text')[1]?.textContent.length ?? 0) > 20", 'a long answer');
  await key('Escape');
  await until("!document.getElementById('send').hidden", 'it stops');
  done('an answer is stopped by Escape');
  await shot('chat-light');

  await key('n', 1);
  await until("document.querySelectorAll('#conversations li').length === 2 && document.querySelectorAll('.message').length === 0", 'a second conversation');
  await call('Page.reload');
  await until("document.readyState === 'complete' && document.querySelectorAll('#conversations li').length === 2", 'conversations after a reload');
  await run("document.querySelectorAll('#conversations li')[1].querySelector('button').click()");
  await until("document.querySelectorAll('.message').length === 4", 'the first conversation');
  done('conversations are kept');

  await run("document.getElementById('settings-open').click()");
  await run("document.getElementById('set-temperature').value = '0.5'; document.getElementById('set-max_tokens').value = '5'");
  await shot('settings-light');
  await run("document.querySelector('#settings button[value=ok]').click()");
  assert.deepEqual(await run("JSON.parse(localStorage.getItem('spillgate.settings'))"), { temperature: 0.5, max_tokens: 5 });
  done('settings are kept');

  // A long text, so that the monitor has something to show.
  const leaving = new AbortController();
  const long = fetch(`${url}/v1/completions`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ prompt: 'The miller opens the gate of the lock. '.repeat(330), max_tokens: 4000, stream: true }),
    signal: leaving.signal,
  });
  const response = await long;
  assert.equal(response.status, 200);
  (async () => { for await (const _ of response.body) { /* until it is left */ } })().catch(() => {});
  const status = async () => (await fetch(`${url}/v1/status`)).json();
  let now = await status();
  const generatedBefore = now.tokens.generated;
  for (let i = 0; i < 900 && now.tokens.generated < generatedBefore + 40; i++) {
    await sleep(200);
    now = await status();
  }
  assert.ok(now.kv.host_bytes > 0 && now.gate, 'cells have spilled');
  await run("document.getElementById('tab-monitor').click()");
  await sleep(6000);
  assert.ok(await run("Number(document.getElementById('rate').textContent) > 0"), 'tokens are counted');
  assert.ok(await run("document.getElementById('memory').textContent.includes('KV tail in use')"), 'the tail is shown');
  assert.ok(await run("document.getElementById('gate').textContent.includes('share now')"), 'the gate is shown');
  done('the monitor follows an answer that spills');

  for (const [name, width, height, mobile] of [['desktop', 1200, 800, false], ['phone', 390, 780, true]]) {
    await size(width, height, mobile);
    for (const colours of ['light', 'dark']) {
      await scheme(colours);
      await run("document.getElementById('tab-chat').click()");
      await sleep(200);
      await shot(`chat-${colours}-${name}`);
      await run("document.getElementById('tab-monitor').click()");
      await until("document.querySelectorAll('#memory .bar i').length > 1 && document.querySelectorAll('#machine dd').length > 2", 'the monitor');
      await sleep(1500);
      await shot(`monitor-${colours}-${name}`);
      const wide = await run('document.documentElement.scrollWidth - document.documentElement.clientWidth');
      assert.ok(wide <= 0, `${name}: ${wide} pixels too wide`);
    }
  }
  leaving.abort();
  done('chat and monitor, light and dark, desktop and phone');
  assert.deepEqual(problems, []);
  done('no error in the console');
  console.log(`${passed} passed, 0 failed`);
} finally {
  browser.kill();
  await sleep(300);
  rmSync(profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
}
