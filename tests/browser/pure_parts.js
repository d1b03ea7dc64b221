// Properties of the page's pure parts, on random inputs. The names of those that fail.
async () => {
    const { pieces, harmless } = await import("/page/lib/text.js");
    const { compare } = await import("/page/lib/table.js");
    const { place, chain } = await import("/page/views/waits.js");
    const { rows, rowOf, cells, drawn } = await import("/page/views/trajectory/strip.js");
    const { lanes, leaves, path } = await import("/page/views/trajectory/tree.js");
    let seed = 7;
    const next = (most) => (seed = (seed * 48271) % 2147483647) % most;
    const parts = ["a", " ", "\n", "\u001b", "\u{1f600}", "\u202e", "<", "word".repeat(999)];
    const problems = [];
    const check = (name, right) => right || problems.push(name);
    for (let run = 0; run < 150; run += 1) {
        const text = Array.from({ length: next(60) }, () => parts[next(parts.length)]).join("");
        const cut = pieces(text);
        check("pieces", cut.join("") === text && cut.every((one) => one.length <= 20000));
        check("pairs", cut.every((one) => one.isWellFormed()));
        check("harmless", !/[\u0000-\u0008\u000b-\u001f\u202e]/.test(harmless(text)));
        const tokens = Array.from({ length: 1 + next(80) }, () => parts[next(7)].repeat(next(5)));
        const width = 10 + next(40);
        const starts = rows(tokens, width);
        check("rows ascend", starts.every((one, i) => i === 0 ? one === 0 : one > starts[i - 1]));
        starts.forEach((from, row) => {
            const of = tokens.slice(from, starts[row + 1]);
            const wide = of.reduce((sum, one) => sum + cells(drawn(one)), 0);
            check("row fits", wide <= width || of.length === 1);
            for (let i = 0; i < of.length; i += 1) check("row of", rowOf(starts, from + i) === row);
        });
        const count = 1 + next(25);
        const waits = Array.from({ length: count }, (_, i) => ({ id: `w${i}`, kind: "x", since: next(9),
            on: Array.from({ length: next(3) }, () => `w${next(count)}`) }));
        const plan = place(waits);
        const spots = [...plan.at.values()].map((one) => `${one.x},${one.y}`);
        check("each placed once", plan.at.size === count && new Set(spots).size === count);
        const found = chain(waits, "w0");
        check("chain", waits.every((one) => found.has(one.id) === (one.id === "w0" || one.on.some((on) => found.has(on)))));
        const turns = Array.from({ length: count }, (_, i) => ({ index: i, parent: next(i + 1) - 1 }));
        check("paths", leaves(turns).every((end) => path(turns, end).every((one, i, all) =>
            turns[one].parent === (i ? all[i - 1] : -1))));
        check("lanes", lanes(turns).size === count && new Set(lanes(turns).values()).size === leaves(turns).length);
        const values = Array.from({ length: 9 }, () => (next(4) ? next(9) : null));
        for (const down of [true, false]) {
            const sorted = [...values].sort((a, b) => compare(a, b, down));
            const known = sorted.filter((one) => one !== null);
            check("absent last", sorted.slice(known.length).every((one) => one === null));
            check("sorted", known.every((one, i) => !i || (down ? known[i - 1] >= one : known[i - 1] <= one)));
        }
    }
    return [...new Set(problems)];
}
