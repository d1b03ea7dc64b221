// The frame of all pages: navigation, the state of the run, and whether the server answers.
import { html, render, useEffect, useErrorBoundary, useRef } from "./vendor/htm-preact.js";
import { retryNow, useConnection, usePoll } from "./lib/api.js";
import { clock, number } from "./lib/format.js";
import { Pill, useNow } from "./lib/parts.js";
import { link, useRoute } from "./lib/route.js";
import { harmless } from "./lib/text.js";
import { ComparePage } from "./views/compare.js";
import { DeadLetterPage, DeadLettersPage } from "./views/dead-letters.js";
import { DiscardedPage } from "./views/discarded.js";
import { EpisodesPage } from "./views/episodes.js";
import { GroupPage } from "./views/group.js";
import { JobsPage } from "./views/jobs.js";
import { RunPage } from "./views/run.js";
import { ToolsPage } from "./views/tools.js";
import { RecordPage, TopicPage, TopicsPage } from "./views/topics.js";
import { TrajectoryPage } from "./views/trajectory.js";
import { VersionPage } from "./views/version.js";
import { WaitsPage } from "./views/waits.js";
import { WorkersPage } from "./views/workers.js";

// name: [page, title, the entry of the navigation that it belongs to]
const PAGES = {
  run: [RunPage, "Run", "run"],
  version: [VersionPage, "Version", "run"],
  episodes: [EpisodesPage, "Episodes", "episodes"],
  episode: [TrajectoryPage, "Episode", "episodes"],
  group: [GroupPage, "Group", "episodes"],
  tools: [ToolsPage, "Tools", "tools"],
  discarded: [DiscardedPage, "Discarded", "discarded"],
  waits: [WaitsPage, "Waits", "waits"],
  workers: [WorkersPage, "Workers", "workers"],
  topics: [TopicsPage, "Topics", "topics"],
  topic: [TopicPage, "Topic", "topics"],
  record: [RecordPage, "Record", "topics"],
  "dead-letters": [DeadLettersPage, "Dead letters", "dead-letters"],
  "dead-letter": [DeadLetterPage, "Dead letter", "dead-letters"],
  compare: [ComparePage, "Compare", "compare"],
  jobs: [JobsPage, "Jobs", "jobs"],
};
const ENTRIES = [["run", "episodes", "tools", "discarded"], ["waits", "workers"], ["topics", "dead-letters"], ["compare", "jobs"]];

function Navigation({ current, run, waits }) {
  const badges = { waits: waits?.waits.filter((one) => !one.on.length).length, "dead-letters": run?.dead_letters };
  return html`<nav class="side" aria-label="Pages">
    <a class="brand" href="#/run"><img src="/page/icon.svg" alt="" width="18" height="18" />Headrace</a>
    ${ENTRIES.map((names) => html`<ul key=${names[0]}>${names.map((name) => html`<li key=${name}>
      <a href=${link([name])} aria-current=${name === current ? "page" : undefined}>${PAGES[name][1]}
        ${name in badges ? html`<span class="badge ${name}">${badges[name] ? number(badges[name]) : ""}</span>` : null}</a></li>`)}</ul>`)}
  </nav>`;
}

const LATE_S = 3;

function Index({ index, now }) {
  if (!index) return null;
  const late = index.caught_up && index.as_of !== null && now - index.as_of > LATE_S;
  if (late && !index.problem) {
    return html`<span class="index" role="status" title="The run goes first on this machine, and the rest of its log is read later.">as of ${clock(index.as_of)}, the machine is busy</span>`;
  }
  if (index.caught_up && !index.problem) return null;
  if (index.problem) return html`<span class="index bad" role="status">${harmless(index.problem)}</span>`;
  return html`<span class="index" role="status">reading the log
    <progress max=${index.total || 1} value=${index.done} aria-label="Log read"></progress>
    ${number(index.done)} of ${number(index.total)}</span>`;
}

function Alive() {
  const state = useConnection();
  const now = useNow() * 1000;
  if (state.goneSince === null) {
    return html`<span class="alive"><i class="dot"></i>${state.answeredAt ? "live" : "connecting"}</span>`;
  }
  const wait = Math.max(0, Math.ceil(((state.retryAt ?? now) - now) / 1000));
  return html`<span class="alive gone"><i class="dot"></i>no answer</span>
    <div class="banner" role="alert">
      <b>The server has not answered since ${clock(state.goneSince / 1000)}.</b>
      <span>You see what it said last. The next try is in <span aria-hidden="true">${wait} s</span><span class="unseen">a moment</span>.
      The run itself does not need this server.</span>
      <button type="button" onClick=${retryNow}>Try now</button>
    </div>`;
}

function Top({ run, title }) {
  return html`<header class="top">
    <h1 tabindex="-1">${title}</h1>
    ${run ? html`<span class="namespace">${harmless(run.namespace)}</span><${Pill}>${run.state}<//>
      <span class="reason muted">${harmless(run.reason)}</span>` : null}
    <${Index} index=${run?.index} now=${run?.now} /><${Alive} />
  </header>`;
}

// `/` goes to the search, `[` and `]` to the neighbours of what is shown.
function shortcuts(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/") {
    event.preventDefault();
    const field = document.querySelector("input[type=search]");
    if (field) field.focus();
    else location.hash = "#/episodes?focus=1";
  }
  const step = { "[": "previous", "]": "next" }[event.key];
  if (step) document.querySelector(`a[data-step="${step}"]`)?.click();
}

// A page that fails says so, and the others go on.
function Guard({ page: Page, ...given }) {
  const [error, retry] = useErrorBoundary((problem) => console.error(problem));
  if (!error) return html`<${Page} ...${given} />`;
  return html`<div class="failed" role="alert"><h2>This page can't show what the server said</h2>
    <p>${harmless(error.message)}. Please report this; \`headrace show\` prints the same facts.</p>
    <button type="button" onClick=${retry}>Try again</button></div>`;
}

function App() {
  const route = useRoute();
  const run = usePoll("/api/run", 2);
  const waits = usePoll("/api/waits", 3);
  const main = useRef(null);
  const [Page, title, entry] = PAGES[route.name] ?? PAGES.run;
  const name = [title, ...route.parts.slice(route.name === "version" ? 1 : 0)].join(" ").replace(/ (\d+) (\d+)$/, " $1/$2");
  const place = [route.name, ...route.parts].join("/");
  useEffect(() => {
    document.title = `${harmless(name)} · ${run.data ? harmless(run.data.namespace) : "Headrace"}`;
  }, [name, run.data?.namespace]);
  useEffect(() => {
    addEventListener("keydown", shortcuts);
    return () => removeEventListener("keydown", shortcuts);
  }, []);
  useEffect(() => main.current.scrollTo(0, 0), [place]);
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <${Navigation} current=${entry} run=${run.data} waits=${waits.data} />
    <main id="main" ref=${main} tabindex="-1">
      <${Top} run=${run.data} title=${harmless(name)} />
      <${Guard} key=${place} page=${Page} route=${route} run=${run} waits=${waits} />
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
