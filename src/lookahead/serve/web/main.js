// Starts the page: one view at a time, chosen by the address, and the model's name once the server reports it.

import { request } from "./api.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { startInside } from "./inside.js";
import { currentKey, forgetKey } from "./key.js";
import { startRace } from "./race.js";
import { startStatus } from "./status.js";
import { startPulse } from "./strip.js";

const VIEWS = ["chat", "race", "inside", "status"];
const status = startStatus();

function show() {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return; // the link that skips the header
  const name = VIEWS.includes(wanted) ? wanted : "chat";
  for (const view of VIEWS) byId(view).hidden = view !== name;
  for (const link of document.querySelectorAll(".top nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  status.shown(name === "status");
}

async function nameModel() {
  try {
    const { data } = await (await request("v1/models")).json();
    byId("model").textContent = data[0].id;
  } catch (error) {
    byId("model").textContent = "";
    console.info(`The model's name is not known: ${error.message}`);
  }
}

addEventListener("hashchange", show);
byId("forget-key").hidden = !currentKey();
byId("forget-key").addEventListener("click", forgetKey);
startPulse();
startChat();
startRace();
startInside();
show();
nameModel();
