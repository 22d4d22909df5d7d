// Server-sent events by fetch, so that the key rides in a header and never in an address.

const KEY = "kedge.key";
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 15_000;

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/**
 * Follows the events of `path` until `stop` is called on what is returned.
 * `on.event(data)`, `on.status(state, text)`, `on.refused(message)`: a key is needed, or another one.
 */
export function follow(path, on) {
  const aborter = new AbortController();
  run(path, on, aborter.signal).catch((error) => {
    if (!aborter.signal.aborted) throw error;
  });
  return { stop: () => aborter.abort() };
}

async function run(path, on, signal) {
  for (let pause = FIRST_PAUSE; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
    const answer = await open(path, signal);
    if (answer?.status === 401) {
      on.refused(await complaint(answer));
      return;
    }
    if (answer?.ok) {
      on.status("live", "live");
      pause = FIRST_PAUSE;
      await read(answer.body, on.event);
    }
    if (signal.aborted) return;
    on.status("lost", answer && !answer.ok ? await complaint(answer) : "connection lost, trying again");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** What a path answers as JSON: its `data`, or the `problem` that there is. */
export async function load(path) {
  const answer = await open(path, undefined, "application/json");
  if (!answer) return { problem: "The server does not answer." };
  return answer.ok ? { data: await answer.json() } : { problem: await complaint(answer) };
}

async function open(path, signal, kind = "text/event-stream") {
  const headers = { Accept: kind };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  try {
    return await fetch(path, { headers, signal, cache: "no-store" });
  } catch {
    return null; // the network's failure; `run` tries again
  }
}

async function complaint(answer) {
  const said = await answer.json().catch(() => null);
  return said?.error?.message ?? `the server answered ${answer.status}`;
}

async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const blocks = (held + part.value).split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").find((line) => line.startsWith("data: "));
        if (data) onEvent(JSON.parse(data.slice(6)));
      }
    }
  } catch (error) {
    if (error instanceof SyntaxError) throw error;
    // a connection that broke ends the stream like one that was closed
  }
}
