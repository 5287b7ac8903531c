// OpenAI's client for Node against a server, whose address is the argument.
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2] + '/v1', apiKey: 'none', maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const ask = (content, more = {}) => client.chat.completions.create({ model, messages: [{ role: 'user', content }], temperature: 0, max_tokens: 60, ...more });
let passed = 0;
const done = (what) => { passed += 1; console.log('ok', what); };

const whole = await ask('Count to five.');
let text = '';
for await (const chunk of await ask('Count to five.', { stream: true })) text += chunk.choices[0]?.delta?.content ?? '';
assert.equal(text, whole.choices[0].message.content);
const talk = [{ role: 'user', content: 'Count to five.' }, whole.choices[0].message, { role: 'user', content: 'And on to eight.' }];
const more = await client.chat.completions.create({ model, messages: talk, temperature: 0, max_tokens: 40 });
assert.ok(more.usage.prompt_tokens_details.cached_tokens > 0);
done('a conversation, whole and streamed');

const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false };
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'The weather of a city', parameters } }];
const called = await ask('What is the weather in Paris?', { tools, tool_choice: 'required' });
assert.deepEqual(Object.keys(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments)), ['city']);
const runner = client.chat.completions.stream({ model, messages: [{ role: 'user', content: 'What is the weather in Paris?' }], temperature: 0, max_tokens: 60, tools, tool_choice: 'required' });
const final = await runner.finalChatCompletion();
assert.deepEqual(final.choices[0].message.tool_calls[0].function.arguments, called.choices[0].message.tool_calls[0].function.arguments);
done('tools');

const schema = { type: 'object', properties: { name: { type: 'string', maxLength: 20 }, age: { type: 'integer' } }, required: ['name', 'age'], additionalProperties: false };
const formed = await ask('Invent a person.', { response_format: { type: 'json_schema', json_schema: { name: 'person', schema, strict: true } } });
assert.deepEqual(Object.keys(JSON.parse(formed.choices[0].message.content)), ['name', 'age']);
done('JSON of a schema');

const response = await client.responses.create({ model, input: 'Count to five.', max_output_tokens: 40, temperature: 0 });
let streamed = '';
for await (const event of await client.responses.create({ model, input: 'Count to five.', max_output_tokens: 40, temperature: 0, stream: true })) {
  if (event.type === 'response.output_text.delta') streamed += event.delta;
}
assert.equal(streamed, response.output_text);
done('responses');

const long = await ask('Tell a long story.', { stream: true, max_tokens: 2000 });
let pieces = 0;
for await (const _ of long) if (++pieces === 3) { long.controller.abort(); break; }
await assert.rejects(() => client.chat.completions.create({ model: 'nope', messages: [{ role: 'user', content: 'x' }] }), { status: 404 });
done('leaving, errors');
console.log(`${passed} passed, 0 failed`);
