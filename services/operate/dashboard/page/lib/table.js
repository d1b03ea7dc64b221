// Tables that are sorted by a click on a column's name, here or by the server.
import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { number } from "./format.js";
import { Empty } from "./parts.js";
import { change } from "./route.js";

// Numbers before texts, absent values last in both directions.
export function compare(first, second, down) {
  const [noFirst, noSecond] = [first ?? null, second ?? null].map((one) => one === null);
  if (noFirst || noSecond) return noFirst - noSecond;
  const sign = down ? -1 : 1;
  if (typeof first === "number" && typeof second === "number") return sign * (first - second);
  return sign * String(first).localeCompare(String(second), "en", { numeric: true });
}

function Head({ column, order, onOrder }) {
  const by = order?.replace(/^-/, "") === column.key;
  const down = order?.startsWith("-");
  const sort = by ? (down ? "descending" : "ascending") : undefined;
  const toggle = () => onOrder(by ? (down ? column.key : `-${column.key}`) : column.up ? column.key : `-${column.key}`);
  return html`<th scope="col" class=${column.left ? "" : "right"} aria-sort=${sort} title=${column.title}>
    ${column.fixed ? column.name : html`<button type="button" onClick=${toggle}>${column.name}<i aria-hidden="true">${by ? (down ? "↓" : "↑") : ""}</i></button>`}
  </th>`;
}

// columns: {key, name, value(row), show(row), left, up, fixed, title}. `order` and `onOrder` if the
// server sorts; else rows are sorted here.
export function Table({ columns, rows, id, label, empty = "Nothing here.", order, onOrder, initial = "", tone }) {
  const [own, setOwn] = useState(initial);
  const chosen = order ?? own;
  const shown = useMemo(() => {
    const column = columns.find((one) => one.key === chosen.replace(/^-/, ""));
    if (onOrder || !column) return rows;
    const value = column.value ?? ((row) => row[column.key]);
    return [...rows].sort((a, b) => compare(value(a), value(b), chosen.startsWith("-")));
  }, [rows, chosen, Boolean(onOrder)]);
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${label}>
    <table><caption class="unseen">${label}</caption>
      <thead><tr>${columns.map((column) => html`<${Head} key=${column.key} column=${column} order=${chosen} onOrder=${onOrder ?? setOwn} />`)}</tr></thead>
      <tbody>${shown.map((row, index) => html`<tr key=${id ? id(row) : index} class=${tone?.(row) ?? ""}>
        ${columns.map((column) => html`<td key=${column.key} class=${column.left ? "" : "right"}>${cell(column, row)}</td>`)}
      </tr>`)}</tbody>
    </table></div>`;
}

function cell(column, row) {
  if (column.show) return column.show(row);
  const value = column.value ? column.value(row) : row[column.key];
  return typeof value === "string" ? value : number(value);
}

// Links to the following and the first page of a list.
export function Pager({ list, shown, name = "cursor", params }) {
  const at = params[name];
  return html`<nav class="pager" aria-label="Pages">
    <span>${number(shown)}${list.total === null || list.total === undefined ? "" : ` of ${number(list.total)}`}</span>
    ${at ? html`<button type="button" onClick=${() => change({ [name]: null })}>First page</button>` : null}
    ${list.next ? html`<button type="button" onClick=${() => change({ [name]: list.next })}>Next page</button>` : null}
  </nav>`;
}
