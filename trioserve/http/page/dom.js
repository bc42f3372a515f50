// Elements and the text in them. Text from the server only ever becomes a text node.

const $ = (id) => document.getElementById(id);

// Writes only what changed, so that a screen reader or a selection is not disturbed each second.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// A bar with a share from 0 to 1; null where it is not known how far it is.
function setBar(bar, share) {
  bar.classList.toggle("unknown", share === null);
  bar.firstElementChild.style.width = share === null ? "" : `${clamp(share, 0, 1) * 100}%`;
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

const NONE = "–";

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function formatCount(value) {
  return grouped.format(value);
}

function formatRate(value) {
  if (value === null) return NONE;
  return value >= 100 || value === 0 ? grouped.format(value) : value.toFixed(1);
}

function formatShare(value) {
  if (value === null) return NONE;
  return `${value > 0 && value < 0.1 ? (value * 100).toFixed(1) : Math.round(value * 100)} %`;
}

function formatSeconds(value) {
  if (value === null) return NONE;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : formatDuration(value);
}

function formatDuration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

function formatBytes(value) {
  let scaled = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (scaled < 1000) return `${unit === "B" ? scaled : scaled.toFixed(1)} ${unit}`;
    scaled /= 1000;
  }
  return `${scaled.toFixed(1)} TB`;
}

function formatParameters(value) {
  return value >= 1e9 ? `${(value / 1e9).toFixed(1)} B` : `${(value / 1e6).toFixed(1)} M`;
}
