// The chat: conversations that the browser keeps, answers that stream in blocks, stop, regenerate, edit and resend.

import { streamChat } from "./api.js";
import { byId, count, el, say } from "./dom.js";
import { downloadJson, downloadMarkdown } from "./export.js";
import { MessageView } from "./message.js";
import * as store from "./store.js";
import { Steps } from "./steps.js";
import { showPulse } from "./strip.js";

const EXAMPLES = [
  "Write a Python class for a stack with push, pop, peek and is_empty.",
  "List the planets of the solar system, each with one short sentence.",
  "Explain what a hash table is to a ten-year-old.",
];
const FIELDS = { system: "set-system", temperature: "set-temperature", top_p: "set-top-p", seed: "set-seed" };
Object.assign(FIELDS, { max_tokens: "set-max-tokens", tint: "set-tint" });
const NEAR_END = 80; // pixels from the end within which the text is followed

let conversations = [];
let current = null;
let views = [];
let settings = {};
let running = null; // the AbortController of the answer that is coming

export function startChat() {
  settings = store.readSettings();
  conversations = store.readConversations();
  for (const text of EXAMPLES) {
    byId("examples").append(el("button", { type: "button", on: { click: () => send(text) } }, text));
  }
  showSettings();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(byId("prompt").value);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", () => open(store.newConversation()));
  byId("show-shelf").addEventListener("click", () => showShelf(!byId("shelf").classList.contains("open")));
  byId("hide-shelf").addEventListener("click", () => showShelf(false));
  byId("export-markdown").addEventListener("click", () => downloadMarkdown(exported()));
  byId("export-json").addEventListener("click", () => downloadJson(exported()));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  addEventListener("pagehide", () => {
    for (const view of views) view.message.steps = view.steps.compact();
    store.writeConversations(conversations);
  });
  open(conversations[0] ?? store.newConversation());
}

// Conversations.

function open(conversation) {
  stop();
  current = conversation;
  if (!conversations.includes(current)) conversations.unshift(current);
  showShelf(false);
  showMessages();
  listConversations();
  if (matchMedia("(pointer: fine)").matches) byId("prompt").focus({ preventScroll: true }); // else a keyboard would rise
}

function showMessages() {
  views = current.messages.map(viewOf);
  byId("messages").replaceChildren(...views.map((view) => view.element));
  byId("welcome").hidden = views.length > 0;
  markLast();
  showPulse(views.findLast((view) => view.steps.list.length)?.steps ?? new Steps());
  if (views.length) scrollToEnd();
  else byId("scroll").scrollTop = 0; // the welcome is read from its top
  byId("export").hidden = !views.length;
}

function viewOf(message) {
  const index = () => current.messages.indexOf(message);
  return new MessageView(message, {
    edit: (text) => {
      current.messages.length = index();
      showMessages();
      send(text);
    },
    regenerate: () => {
      stop();
      const [before] = current.messages.splice(index());
      showMessages();
      answer(before);
    },
  });
}

/** Only the last message can be regenerated. */
function markLast() {
  views.forEach((view, index) => {
    const last = index === views.length - 1;
    if (view.last !== last) {
      view.last = last;
      view.renderFoot();
    }
  });
}

function listConversations() {
  const items = conversations
    .filter((one) => one.messages.length)
    .map((one) => {
      const chosen = one === current ? { "aria-current": "true" } : {};
      const name = { "aria-label": `Delete the conversation ${one.title}` };
      const choose = button("quiet choose", chosen, () => open(one), one.title);
      return el("li", {}, choose, button("quiet tiny", name, () => remove(one), "×"));
    });
  byId("conversations").replaceChildren(...items);
}

function button(classes, attributes, click, label) {
  return el("button", { type: "button", class: classes, ...attributes, on: { click } }, label);
}

function remove(conversation) {
  conversations = conversations.filter((one) => one !== conversation);
  store.forget(conversation);
  store.writeConversations(conversations);
  if (conversation === current) open(conversations[0] ?? store.newConversation());
  else listConversations();
}

function showShelf(open) {
  byId("shelf").classList.toggle("open", open);
  byId("show-shelf").setAttribute("aria-expanded", open);
}

// Asking and answering.

function send(given) {
  const text = given.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  current.title ||= text.slice(0, 60);
  append({ role: "user", text });
  listConversations();
  store.writeConversations(conversations);
  answer();
}

function append(message) {
  current.messages.push(message);
  const view = viewOf(message);
  views.push(view);
  byId("messages").append(view.element);
  byId("welcome").hidden = true;
  byId("export").hidden = false;
  markLast();
  scrollToEnd();
  return view;
}

/** Get an answer to the conversation. If not a word of it comes, the text of the one `before` is shown again. */
async function answer(before = null) {
  const conversation = current;
  const messages = history();
  const message = { role: "assistant", text: "", steps: [], state: "streaming" };
  const view = append(message);
  const controller = new AbortController();
  running = controller;
  showRunning();
  say("The answer is coming.");
  try {
    for await (const part of streamChat({ messages, settings: sampling(), signal: controller.signal })) {
      const follow = isNearEnd();
      view.add(part.text, part.steps);
      if (part.steps.length) showPulse(view.steps);
      if (follow) requestAnimationFrame(scrollToEnd);
    }
    message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    message.error = message.state === "failed" ? error.message : null;
    if (!message.text && before?.text) {
      message.text = before.text;
      view.steps = new Steps(before.steps);
    }
  }
  message.steps = view.steps.compact();
  view.render();
  if (running === controller) running = null;
  showRunning();
  if (conversation === current) scrollToEnd();
  store.writeConversations(conversations);
  report(message, view);
}

function report(message, view) {
  const { tokens, steps } = view.steps.numbers();
  const end = message.state === "stopped" ? "was stopped" : "is complete";
  if (message.state === "failed") say(`The answer failed. ${message.error}`);
  else say(`The answer ${end}: ${count(tokens, "token")} in ${count(steps, "step")}.`);
}

/** The messages that the model reads. An answer that never began is left out. */
function history() {
  const said = current.messages.filter((one) => one.text).map(({ role, text }) => ({ role, content: text }));
  return settings.system ? [{ role: "system", content: settings.system }, ...said] : said;
}

/** The settings that go into a request. */
function sampling() {
  const { temperature, top_p, seed, max_tokens } = settings;
  const given = { temperature, top_p, max_tokens };
  return seed === null ? given : { ...given, seed };
}

/** The conversation as it is now, with what an export tells of it. */
function exported() {
  const messages = views.map((view) => ({ ...view.message, steps: view.steps.compact() }));
  return { title: current.title, messages, model: byId("model").textContent, settings };
}

function stop() {
  running?.abort();
  running = null;
  showRunning();
}

function showRunning() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

function isNearEnd() {
  const box = byId("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
}

function scrollToEnd() {
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

// Settings.

function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) {
    const input = byId(id);
    if (input.type === "checkbox") input.checked = settings[name];
    else input.value = settings[name] ?? "";
    input.addEventListener("change", () => takeSetting(name, input));
  }
  byId("messages").classList.toggle("untinted", !settings.tint);
}

/** Take a setting if it is a valid one. An empty seed is a random one; another empty number stays as it was. */
function takeSetting(name, input) {
  if (input.type === "checkbox") settings[name] = input.checked;
  else if (input.type === "number") {
    const kept = name === "seed" ? null : settings[name];
    settings[name] = input.value === "" || !input.checkValidity() ? kept : Number(input.value);
    input.value = settings[name] ?? "";
  } else settings[name] = input.value.trim();
  byId("messages").classList.toggle("untinted", !settings.tint);
  store.writeSettings(settings);
}
