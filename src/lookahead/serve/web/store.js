// What the browser keeps: conversations and settings. The server keeps none of it.

const CONVERSATIONS = "lookahead.conversations";
const SETTINGS = "lookahead.settings";
const MOST = 50; // conversations; the oldest go first

export const DEFAULTS = { system: "", temperature: 0, top_p: 1, seed: null, max_tokens: 256, tint: true };

export function readSettings() {
  return { ...DEFAULTS, ...read(SETTINGS, {}) };
}

export function writeSettings(settings) {
  write(SETTINGS, settings);
}

const forgotten = new Set(); // the ids of conversations that were deleted in this tab

/** Conversations, the newest first: {id, title, messages: [{role, text, steps, state, error}]}. */
export function readConversations() {
  const found = read(CONVERSATIONS, []);
  if (!Array.isArray(found)) return [];
  for (const message of found.flatMap((one) => one.messages)) {
    if (message.state === "streaming") message.state = "stopped"; // the page was closed meanwhile
  }
  return found;
}

/** Keep conversations, and those that another tab has kept. If the browser has no room for all, the oldest go. */
export function writeConversations(conversations) {
  const known = new Set([...conversations.map((one) => one.id), ...forgotten]);
  const others = readConversations().filter((one) => !known.has(one.id));
  let kept = [...conversations, ...others].filter((one) => one.messages.length).slice(0, MOST);
  while (!write(CONVERSATIONS, kept) && kept.length > 1) kept = kept.slice(0, Math.floor(kept.length / 2));
}

/** Do not keep this conversation any longer. */
export function forget(conversation) {
  forgotten.add(conversation.id);
}

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
}

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
