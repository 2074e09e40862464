// Reads what the server says of its model, and joins the training of a link when the person starts.

import { Refused } from "../engine/refused.js";
import { keepCode, keptCode } from "./store.js";

export const FORMAT = 1; // of layer graphs that this build of the page understands
const GONE = ["The server does not answer.", "Check that `ddlf peers serve` still runs and that you are online, then reload this page."];

async function asked(path, options) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    throw new Refused(...GONE);
  }
}

const withCode = (code) => (code ? { headers: { "X-DDLF-Code": code } } : {});

// Take the code behind the # of the address, if there is one, and remove it from there. This tab keeps it until it is used.
export function takeCode() {
  const [code] = location.hash.slice(1).split(".");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  keepCode(code);
}

// Return why a code is refused.
async function refusal(answer) {
  const why = (await answer.text()).trim().slice(0, 200);
  if (why.startsWith("the training is over")) return new Refused(why, "Ask for another training.");
  if (answer.status === 403) return new Refused("This link was used already, or it has expired.", "Each link is for one person, once. Ask for a new one: `ddlf peers invite`.");
  return new Refused(`The server refuses this link: ${why}`, "Ask for a new one: `ddlf peers invite`.");
}

// Use the code of the link, if this tab has one.
export async function join() {
  const code = keptCode();
  if (!code) return;
  const answer = await asked("/join", withCode(code));
  keepCode("");
  if (answer.ok || (answer.status === 403 && (await asked("/graph")).status !== 401)) return; // or this browser has used it before
  throw await refusal(answer);
}

// Return {graph, plan, name, classes}. The code of the link stays unused.
export async function readGraph() {
  const code = keptCode(), answer = await asked("/graph", withCode(code));
  if (answer.status === 403 && code) {
    keepCode("");
    throw await refusal(answer);
  }
  if (answer.status === 401 || answer.status === 403) {
    throw new Refused("This browser has no place in this training.", "Open the whole link, with the part behind #. A link of another run is void here: ask for a new one.");
  }
  if (answer.status === 409) throw new Refused(`This model cannot be trained in a browser: ${(await answer.text()).slice(0, 500)}`, "Take part with Python: `ddlf peers join LINK --data mine.npz`.");
  if (!answer.ok) throw new Refused(`The server has no model for this page (status ${answer.status}).`, "Reload this page. If that changes nothing, the server is of another build of DDLF.");
  const found = await answer.json();
  if (found.graph?.format !== FORMAT) throw new Refused("This page is of an older build than the server.", "Reload this page without its cache: Ctrl+Shift+R, on a Mac Cmd+Shift+R.");
  return found;
}
