// Requests to the server this page came from, with the key where there is one.

const ANSWER_S = 5;
const KEY = "trioserve-key";

class Refused extends Error {
  // The server's own words on why it does not answer; `status` is HTTP's.
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const link = {
  key: null,

  recall() {
    try {
      this.key = sessionStorage.getItem(KEY);
    } catch {
      this.key = null; // storage is off: the key lasts as long as the document
    }
  },

  remember(key) {
    this.key = key;
    try {
      if (key === null) sessionStorage.removeItem(KEY);
      else sessionStorage.setItem(KEY, key);
    } catch {
      // As above.
    }
  },

  // Raises Refused for any answer but a 2xx, and fetch's own errors.
  async request(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key !== null) headers.Authorization = `Bearer ${this.key}`;
    const response = await fetch(path, { cache: "no-store", ...options, headers });
    if (!response.ok) throw new Refused(response.status, await messageOf(response));
    return response;
  },

  async get(path, read) {
    const response = await this.request(path, { signal: AbortSignal.timeout(ANSWER_S * 1000) });
    return response[read]();
  },
};

async function messageOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error.message === "string" && error.message) return error.message;
  } catch {
    // Not one of ours: a proxy's page, perhaps.
  }
  return `HTTP ${response.status} without a message`;
}
