// Follows /dashboard/feed, whose events are whole documents. Connects again by itself.

const SILENCE_MS = 5000; // the gateway sends two updates a second
const BACKOFF_MS = [300, 600, 1200, 2500, 5000];

export const key = {
  get: () => sessionStorage.getItem("quire-key"),
  set: (value) => sessionStorage.setItem("quire-key", value),
};

export const headers = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

export async function problemOf(response) {
  try { return (await response.json()).error.message; } catch { return `HTTP ${response.status}`; }
}

/** Yields the events of a response, [{name, data}]: those that arrived together. */
export async function* arrivals(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    yield blocks.map((block) => {
      const fields = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]));
      return { name: fields.event, data: fields.data };
    });
  }
}

/** Calls onDocument after each update, and onStatus(state, text) when the connection changes. */
export async function follow(onDocument, onStatus) {
  let tries = 0;
  for (;;) {
    const abort = new AbortController();
    let silence;
    const heard = () => { clearTimeout(silence); silence = setTimeout(() => abort.abort(), SILENCE_MS); };
    try {
      heard();
      const response = await fetch("/dashboard/feed", { headers: headers(), signal: abort.signal });
      if ([401, 403].includes(response.status)) {
        await onStatus("refused", await problemOf(response), response.status === 401 || Boolean(key.get())); // resolves with a key
        continue;
      }
      if (!response.ok) throw new Error(await problemOf(response));
      for await (const arrived of arrivals(response)) {
        heard();
        for (const { data } of arrived) {
          tries = 0;
          onStatus("live");
          onDocument(JSON.parse(data));
        }
      }
      throw new Error("the gateway has ended the connection");
    } catch (error) {
      const why = error instanceof TypeError || error.name === "AbortError" ? "the gateway does not answer" : error.message;
      onStatus("offline", why);
    } finally {
      clearTimeout(silence);
    }
    await new Promise((resolve) => setTimeout(resolve, BACKOFF_MS[Math.min(tries, BACKOFF_MS.length - 1)]));
    tries += 1;
  }
}
