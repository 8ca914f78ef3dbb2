// A conversation as a file: Markdown to read, JSON to use. It is made in the browser, and no server sees it.

import { el, say } from "./dom.js";
import { Steps } from "./steps.js";

const NAMES = { user: "You", assistant: "Model" };
const ENDS = { stopped: "Stopped before its end.", failed: "Failed before its end.", streaming: "Not complete yet." };

export function downloadMarkdown(conversation) {
  download(nameOf(conversation, "md"), "text/markdown", toMarkdown(conversation));
}

export function downloadJson(conversation) {
  download(nameOf(conversation, "json"), "application/json", `${JSON.stringify(toRecord(conversation), null, 2)}\n`);
}

/** The messages under headings. What a message holds is Markdown already, and stays as it was written. */
export function toMarkdown({ title, model, settings, messages }) {
  const parts = [`# ${oneLine(title) || "A conversation"}`];
  if (model) parts.push(`Model: ${oneLine(model)}`);
  if (settings.system) parts.push("## System", settings.system);
  for (const message of messages) {
    parts.push(`## ${NAMES[message.role]}`, message.text);
    if (message.role === "assistant") parts.push(factsOf(message));
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

function factsOf(message) {
  const facts = [numbersOf(message), ENDS[message.state]].filter(Boolean).join(" ");
  return facts && `*${facts}*`;
}

function numbersOf({ steps }) {
  const { tokens, steps: number, compression } = new Steps(steps).numbers();
  return number ? `${tokens} tokens in ${number} steps, S = ${compression.toFixed(2)}.` : "";
}

/** The messages as the API takes them, and beside each answer how it ended and what its steps did. */
export function toRecord({ title, model, settings, messages }) {
  const { system, temperature, top_p, seed, max_tokens } = settings;
  return {
    title,
    model,
    saved: new Date().toISOString(),
    settings: { temperature, top_p, seed, max_tokens },
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.map(({ role, text, state, error, steps }) => {
        if (role !== "assistant") return { role, content: text };
        return { role, content: text, state, ...(error ? { error } : {}), steps };
      }),
    ],
  };
}

function oneLine(text) {
  return text.replace(/\s+/g, " ").trim();
}

/** A file's name from the title: letters, digits and hyphens alone. */
function nameOf({ title }, ending) {
  const words = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  return `lookahead-${words || "conversation"}.${ending}`;
}

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  say(`${name} is downloaded.`);
}
