const number = value => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(3)
  : String(Number(value.toPrecision(5)));
document.querySelectorAll('.plot').forEach(plot => {
  const svg = plot.querySelector('svg'), cursor = plot.querySelector('.cursor');
  const [left, right, low, high] = svg.dataset.range.split(' ').map(Number);
  const lines = [...plot.querySelectorAll('path[data-name]')].map(path => ({
    shown: plot.querySelector(path.dataset.name),
    points: [...path.getAttribute('d').matchAll(/[ML]([\d.]+) ([\d.]+)/g)]
      .map(match => [+match[1], +match[2]]) }));
  const at = plot.querySelector('.at');
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = 1000 * (event.clientX - box.left) / box.width;
    let nearest = null;
    lines.forEach(line => {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a, line.points[0]);
      line.shown.textContent = ' ' + number(low + (1 - near[1] / 300) * (high - low)); nearest ??= near[0];
    });
    if (nearest === null) return;
    cursor.setAttribute('x1', nearest); cursor.setAttribute('x2', nearest); cursor.removeAttribute('hidden');
    at.textContent = 'at ' + Math.round(left + nearest / 1000 * (right - left)).toLocaleString();
  });
  svg.addEventListener('pointerleave', () => {
    cursor.setAttribute('hidden', ''); at.textContent = ''; lines.forEach(line => { line.shown.textContent = ''; });
  });
});
