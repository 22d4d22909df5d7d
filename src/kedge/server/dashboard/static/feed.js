// What the server answers, by fetch, so that the key rides in a header and never in an address.

const KEY = "kedge.key";
const LONGEST_PAUSE_MS = 15_000;

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What a path answers as JSON: its `data`, or the `problem` that there is and whether a key is `refused`. */
export async function load(path, signal) {
  const headers = { Accept: "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  try {
    const answer = await fetch(path, { headers, signal, cache: "no-store" });
    const said = await answer.json().catch(() => null);
    if (answer.ok) return { data: said };
    return { problem: said?.error?.message ?? `the server answered ${answer.status}`, refused: answer.status === 401 };
  } catch {
    return { problem: "the server does not answer, trying again" };
  }
}

/** Calls `ask` with a signal, `pause_ms` after it has returned, less often while it returns false. Returns what stops it. */
export function poll(ask, pause_ms) {
  const aborter = new AbortController();
  const { signal } = aborter;
  const run = async () => {
    for (let pause = pause_ms; !signal.aborted; ) {
      pause = (await ask(signal)) === false ? Math.min(2 * pause, LONGEST_PAUSE_MS) : pause_ms;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  };
  run();
  return () => aborter.abort();
}
