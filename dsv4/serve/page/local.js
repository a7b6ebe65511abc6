// Small values that outlive a reload. Where the browser forbids storage, they end with the tab.

class Kept {
  constructor(name) {
    this.name = name;
    this.memory = new Map();
  }

  get(key) {
    try {
      return globalThis[this.name].getItem(key) ?? this.memory.get(key) ?? "";
    } catch {
      return this.memory.get(key) ?? "";
    }
  }

  // An empty value is none.
  set(key, value) {
    this.memory.set(key, value);
    try {
      if (value) globalThis[this.name].setItem(key, value);
      else globalThis[this.name].removeItem(key);
      this.memory.delete(key);
    } catch {
      // Full or forbidden: `store.js` reports both.
    }
  }
}

export const local = new Kept("localStorage");
export const session = new Kept("sessionStorage");
