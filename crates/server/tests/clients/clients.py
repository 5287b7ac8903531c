"""The official Python clients of OpenAI and Anthropic against a server, whose address is the argument."""
import json
import sys

import anthropic
import openai

URL = sys.argv[1]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris? Use the tool."
passed = 0


def done(what):
    global passed
    passed += 1
    print("ok", what)


def with_openai():
    client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    ask = lambda text, **more: client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=60, **more)

    talk = [{"role": "user", "content": "My name is Ada. Say hello."}]
    first = client.chat.completions.create(model=model, messages=talk, temperature=0, max_tokens=40)
    talk += [first.choices[0].message, {"role": "user", "content": "What is my name?"}]
    second = client.chat.completions.create(model=model, messages=talk, temperature=0, max_tokens=40)
    assert second.choices[0].message.content and second.usage.prompt_tokens_details.cached_tokens > 0, second
    done("openai: a conversation")

    whole = ask("Count to five.", logprobs=True, top_logprobs=2)
    stream = ask("Count to five.", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    done("openai: streamed and whole are the same")

    several = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Name a colour."}], n=3, max_tokens=8, seed=3, temperature=1)
    assert [c.index for c in several.choices] == [0, 1, 2]
    done("openai: several answers")

    tools = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER}}]
    for choice in ["required", {"type": "function", "function": {"name": "get_weather"}}]:
        answer = ask(QUESTION, tools=tools, tool_choice=choice)
        call = answer.choices[0].message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"}, answer
        assert answer.choices[0].finish_reason == "tool_calls"
    streamed = list(ask(QUESTION, tools=tools, tool_choice="required", stream=True))
    calls = [c.choices[0].delta.tool_calls[0] for c in streamed if c.choices and c.choices[0].delta.tool_calls]
    assert json.loads("".join(c.function.arguments or "" for c in calls)) == arguments
    talk = [{"role": "user", "content": QUESTION}, answer.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "21 C, sunny"}]
    last = client.chat.completions.create(model=model, messages=talk, tools=tools, temperature=0, max_tokens=60)
    assert last.choices[0].message.content or last.choices[0].message.tool_calls
    auto = ask(QUESTION, tools=tools)
    print("   left to itself the model", "called" if auto.choices[0].message.tool_calls else "did not call")
    done("openai: tools")

    answer = ask("Invent a person.", response_format={
        "type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}})
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 150, person
    done("openai: JSON of a schema")

    response = client.responses.create(model=model, input="Count to five.", max_output_tokens=40, temperature=0)
    assert response.status in ("completed", "incomplete") and response.output_text, response
    text, kinds = "", []
    for event in client.responses.create(model=model, input="Count to five.", max_output_tokens=40, temperature=0, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == response.output_text and kinds[0] == "response.created", (text, kinds)
    called = client.responses.create(model=model, input=QUESTION, temperature=0, tool_choice="required", tools=[
        {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}])
    assert called.output[-1].type == "function_call" and json.loads(called.output[-1].arguments)["city"]
    formed = client.responses.create(model=model, input="Invent a person.", temperature=0, max_output_tokens=60, text={
        "format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}})
    assert set(json.loads(formed.output_text)) == {"name", "age"}
    done("openai: responses")

    texts = ["The river rises after the rain.", "After rainfall the river gets higher.", "def add(a, b): return a + b"]
    embedded = client.embeddings.create(model=model, input=texts)
    vectors = [one.embedding for one in embedded.data]
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert all(abs(dot(v, v) - 1) < 1e-4 for v in vectors) and embedded.usage.prompt_tokens > 15, embedded.usage
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2]), [dot(vectors[0], v) for v in vectors]
    alone = client.embeddings.create(model=model, input=texts[1], encoding_format="float", dimensions=16).data[0].embedding
    assert len(alone) == 16
    done("openai: embeddings")

    text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, logprobs=1, temperature=0)
    assert text.choices[0].text and text.choices[0].logprobs.tokens
    for wrong, error in [
        (dict(model="nope"), openai.NotFoundError),
        (dict(temperature=-1), openai.BadRequestError),
        (dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}), openai.BadRequestError),
    ]:
        try:
            client.chat.completions.create(**{"model": model, "messages": talk[:1], **wrong})
            raise SystemExit(f"{wrong} was answered")
        except error as e:
            assert e.body["message"], e
    done("openai: completions, errors")


def with_anthropic():
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    model = openai.OpenAI(base_url=URL + "/v1", api_key="none").models.list().data[0].id
    # Its temperature is the server's.
    common = dict(model=model, max_tokens=60)
    talk = [{"role": "user", "content": "My name is Ada. Say hello."}]
    first = client.messages.create(system="Be short.", messages=talk, **common)
    assert first.content[0].type == "text" and first.stop_reason in ("end_turn", "max_tokens"), first
    talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "What is my name?"}]
    second = client.messages.create(system="Be short.", messages=talk, **common)
    assert second.content and second.usage.cache_read_input_tokens > 0, second
    done("anthropic: a conversation")

    with client.messages.stream(system="Be short.", messages=talk, **common) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == second.content[0].text == final.content[0].text, (text, second)
    assert final.usage.output_tokens == second.usage.output_tokens
    done("anthropic: streamed and whole are the same")

    tools = [{"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER}]
    asked = dict(messages=[{"role": "user", "content": QUESTION}], tools=tools, tool_choice={"type": "any"}, **common)
    answer = client.messages.create(**asked)
    call = answer.content[-1]
    assert answer.stop_reason == "tool_use" and set(call.input) == {"city", "unit"}, answer
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[-1].input == call.input
    talk = asked["messages"] + [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": "21 C, sunny"}]}]
    assert client.messages.create(messages=talk, tools=tools, **common).content
    done("anthropic: tools")

    formed = client.messages.create(messages=[{"role": "user", "content": "Invent a person."}], **common, output_config={
        "format": {"type": "json_schema", "schema": PERSON}})
    assert set(json.loads(formed.content[0].text)) == {"name", "age"}, formed
    done("anthropic: JSON of a schema")

    counted = client.messages.count_tokens(model=model, messages=asked["messages"])
    assert counted.input_tokens > 5
    try:
        client.messages.create(messages=[], **common)
        raise SystemExit("no messages were answered")
    except anthropic.BadRequestError as e:
        assert e.body["error"]["type"] == "invalid_request_error", e.body
    done("anthropic: counts, errors")


with_openai()
with_anthropic()
print(f"{passed} passed, 0 failed")
