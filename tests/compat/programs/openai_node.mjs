// The official Node client: whole answers, streams, helpers, raw responses, errors, timeouts.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const model = process.env.COMPAT_MODEL;
const client = new OpenAI({ baseURL: `${process.env.COMPAT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const answer = "The capital of France is Paris.";

test("chat", async () => {
  const said = await client.chat.completions.create({ model, messages, temperature: 0 });
  assert.equal(said.choices[0].message.content, answer);
  assert.equal(said.choices[0].finish_reason, "stop");
  assert.equal(said.usage.total_tokens, 45);
  assert.ok(said._request_id);
});

test("a stream", async () => {
  const stream = await client.chat.completions.create({
    model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null, role = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    role ??= chunk.choices[0]?.delta.role ?? null;
    usage = chunk.usage ?? usage;
  }
  assert.deepEqual([text, role, usage.total_tokens], [answer, "assistant", 45]);
});

test("the helper for streams", async () => {
  const stream = client.chat.completions.stream({ model, messages, temperature: 0 });
  assert.equal(await stream.finalContent(), answer);
  assert.equal((await stream.finalChatCompletion()).choices[0].finish_reason, "stop");
});

test("a stream that is left", async () => {
  const stream = await client.completions.create({ model, prompt: "a", max_tokens: 4000, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
});

test("completions", async () => {
  const prompt = "Here is the English alphabet: ABC";
  const said = await client.completions.create({ model, prompt, temperature: 0, stop: "HI" });
  assert.equal(said.choices[0].text, "DEFG");
});

test("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("raw responses", async () => {
  const asked = client.chat.completions.create({ model, messages }, { headers: { "X-Request-Id": "mine-2" } });
  const { data, request_id } = await asked.withResponse();
  assert.equal(request_id, "mine-2");
  assert.ok(data.choices[0].message.content);
});

test("errors have their classes", async () => {
  const ask = (body) => client.chat.completions.create({ model, messages, ...body });
  for (const stream of [false, true]) {
    await assert.rejects(ask({ messages: [], stream }), (error) =>
      error instanceof OpenAI.BadRequestError && error.param === "messages");
    await assert.rejects(ask({ model: "nothing", stream }), (error) =>
      error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  }
  await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
});

test("a timeout", async () => {
  const asked = client.completions.create({ model, prompt: "a", max_tokens: 4000 }, { timeout: 50 });
  await assert.rejects(asked, OpenAI.APIConnectionTimeoutError);
});
