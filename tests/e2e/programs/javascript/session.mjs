// Prints as JSON what openai-node and the AI SDK got of a server, each with two tool calls: session.mjs URL

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import OpenAI from "openai";

const url = process.argv[2];
const model = "scripted";
const prompt = "qztask: how is the weather in Bergen, and in Oslo?";
const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const description = "Returns the weather of a city.";
const weather = (city) => `Hail in ${city}.`;

async function chat(client) {
  const cities = [];
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: prompt }],
    stream: true,
    stream_options: { include_usage: true },
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description,
          parameters: schema,
          parse: JSON.parse,
          function: ({ city }) => (cities.push(city), weather(city)),
        },
      },
    ],
  });
  return { text: await runner.finalContent(), cities, tokens: (await runner.totalUsage()).total_tokens };
}

async function responses(client) {
  const tools = [{ type: "function", name: "weather", description, parameters: schema, strict: true }];
  const cities = [];
  let input = prompt;
  let previous;
  for (;;) {
    const stream = client.responses.stream({ model, input, tools, previous_response_id: previous });
    const response = await stream.finalResponse();
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return { text: response.output_text, cities, tokens: response.usage.total_tokens };
    previous = response.id;
    input = calls.map((call) => {
      const { city } = JSON.parse(call.arguments);
      cities.push(city);
      return { type: "function_call_output", call_id: call.call_id, output: weather(city) };
    });
  }
}

async function aiSdk(languageModel) {
  const cities = [];
  const tools = {
    weather: tool({
      description,
      inputSchema: jsonSchema(schema),
      execute: async ({ city }) => (cities.push(city), weather(city)),
    }),
  };
  const asked = { model: languageModel, prompt, tools, stopWhen: stepCountIs(5) };
  const whole = await generateText(asked);
  const streamed = streamText(asked);
  return {
    text: whole.text,
    streamed: await streamed.text,
    cities,
    tokens: (whole.totalUsage ?? whole.usage).totalTokens,
  };
}

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any" });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" });
const compatible = createOpenAICompatible({ name: "caravan", baseURL: `${url}/v1`, includeUsage: true });
const ollama = createOllama({ baseURL: `${url}/api` });
console.log(
  JSON.stringify({
    "openai-node, chat": await chat(client),
    "openai-node, responses": await responses(client),
    "AI SDK, responses": await aiSdk(openai(model)),
    "AI SDK, chat": await aiSdk(openai.chat(model)),
    "AI SDK, compatible": await aiSdk(compatible(model)),
    "AI SDK, Ollama": await aiSdk(ollama(model)),
  }),
);
