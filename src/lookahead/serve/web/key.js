// The API key: prompted for once if the server requires one, and kept until the tab is closed.

import { byId } from "./dom.js";

const STORAGE_KEY = "lookahead.key";
let waiting = null; // the promise of the dialog that is open

export function currentKey() {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? "";
  } catch {
    return "";
  }
}

export function forgetKey() {
  try {
    sessionStorage.removeItem(STORAGE_KEY);
  } catch {
    // Then there is none.
  }
  byId("forget-key").hidden = true;
}

/** Ask for a key, and say why. Resolves to whether there is a new one. Concurrent callers share the answer. */
export function askForKey(why) {
  waiting ??= open(why).finally(() => {
    waiting = null;
  });
  return waiting;
}

function open(why) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-why").textContent = why;
  input.value = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    byId("key-cancel").onclick = () => dialog.close();
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close(input.value.trim());
    };
    dialog.onclose = () => {
      const key = dialog.returnValue;
      dialog.returnValue = "";
      if (key) keep(key);
      resolve(Boolean(key));
    };
  });
}

function keep(key) {
  try {
    sessionStorage.setItem(STORAGE_KEY, key);
  } catch {
    // It cannot be kept, and will be asked for again.
  }
  byId("forget-key").hidden = false;
}
