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

/** Conversations, the newest first: {id, title, messages: [{role, text, steps, state, error, usage}]}. */
export function readConversations() {
  const found = read(CONVERSATIONS, []);
  return Array.isArray(found) ? found : [];
}

/** Keep conversations. If the browser has no room for all, the oldest are dropped. */
export function writeConversations(conversations) {
  let kept = conversations.filter((one) => one.messages.length).slice(0, MOST);
  while (!write(CONVERSATIONS, kept) && kept.length > 1) kept = kept.slice(0, Math.floor(kept.length / 2));
}

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
}

function read(place, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(place)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(place, value) {
  try {
    localStorage.setItem(place, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
