// node render.mjs --prometheus http://127.0.0.1:9090 --from 2026-01-01T12:00:00Z --to 2026-01-01T12:05:00Z \
//   --scrape 15 --out FOLDER  dashboard-latency="Latency,Throughput" ...
import { build } from 'esbuild';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import puppeteer from 'puppeteer-core';
import { marks, panelFrames } from './frames.mjs';

const here = (path) => new URL(path, import.meta.url).pathname;
const { values: args, positionals: pictures } = parseArgs({
  allowPositionals: true,
  options: {
    prometheus: { type: 'string', default: 'http://127.0.0.1:9090' },
    from: { type: 'string' },
    to: { type: 'string' },
    scrape: { type: 'string', default: '15' },
    out: { type: 'string', default: '.' },
    chromium: { type: 'string', default: 'chromium' },
  },
});
const seconds = (text, otherwise) => (text ? Date.parse(text) / 1000 : otherwise);
const to = seconds(args.to, Math.floor(Date.now() / 1000));
const from = seconds(args.from, to - 3600);
const scrape = Number(args.scrape);
const range = { from, to, scrape, step: Math.max(scrape, Math.ceil((to - from) / 500)) };

const dashboard = JSON.parse(await readFile(here('../dashboards/kimi.json'), 'utf8'));
const shown = dashboard.panels.filter((panel) => panel.type !== 'row');
const frames = Object.fromEntries(
  await Promise.all(shown.map(async (panel) => [panel.id, await panelFrames(args.prometheus, panel, range)])),
);
const found = await Promise.all(dashboard.annotations.list.map((one) => marks(args.prometheus, one, range)));
const empty = shown.filter((panel) => frames[panel.id].length === 0).map((panel) => panel.title);
if (empty.length) console.error(`no data: ${empty.join(', ')}`);

const folder = await mkdtemp(join(tmpdir(), 'kimi-render-'));
try {
  await build({
    entryPoints: [here('page.jsx')],
    outfile: join(folder, 'page.js'),
    bundle: true,
    jsx: 'automatic',
    format: 'iife',
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    loader: { '.svg': 'dataurl', '.ttf': 'dataurl', '.woff': 'dataurl', '.woff2': 'dataurl' },
    logLevel: 'error',
  });
  const data = JSON.stringify({ dashboard, frames, marks: found.flat(), range }).replaceAll('<', '\\u003c');
  await writeFile(
    join(folder, 'page.html'),
    `<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page.css">
<body style="margin:0"><div id="root" style="box-sizing:content-box;width:1600px;padding:12px"></div>
<script>window.RENDER = ${data}; window.process = { env: {} };</script><script src="page.js"></script>`,
  );
  const browser = await puppeteer.launch({ executablePath: await executable(args.chromium), args: ['--no-sandbox', '--allow-file-access-from-files'] });
  try {
    const page = await browser.newPage();
    page.on('pageerror', (error) => console.error(`page: ${error.message}`));
    await page.setViewport({ width: 1624, height: 1200 });
    await page.goto(`file://${join(folder, 'page.html')}`);
    await page.waitForSelector('[data-row] canvas');
    await new Promise((done) => setTimeout(done, 2000)); // the last charts lay themselves out
    for (const picture of pictures) {
      const [name, titles] = picture.split('=');
      await page.evaluate((wanted) => {
        for (const section of document.querySelectorAll('[data-row]')) {
          section.style.display = wanted.includes(section.dataset.row) ? '' : 'none';
        }
      }, titles.split(','));
      const root = await page.$('#root');
      await root.screenshot({ path: join(args.out, `${name}.png`) });
      console.log(join(args.out, `${name}.png`));
    }
  } finally {
    await browser.close();
  }
} finally {
  await rm(folder, { recursive: true });
}

async function executable(name) {
  if (name.includes('/')) return name;
  for (const folder of process.env.PATH.split(':')) {
    const path = join(folder, name);
    if (await readFile(path).then(() => true, () => false)) return path;
  }
  throw new Error(`${name} is not on PATH; give --chromium PATH`);
}
