/** Sounds that the server does not decode, as WAV files. */

// What encoders of audio are trained with.
const RATE = 16_000;
const HEADER = 44;

/** Returns a WAV file of one channel with 16 bits. Throws an error if the browser cannot decode the file. */
export async function waveOf(content) {
  const decoder = new OfflineAudioContext(1, 1, RATE);
  const sound = await decoder.decodeAudioData(content);
  const mixer = new OfflineAudioContext(1, Math.ceil(sound.duration * RATE), RATE);
  const source = mixer.createBufferSource();
  source.buffer = sound;
  source.connect(mixer.destination);
  source.start();
  const samples = (await mixer.startRendering()).getChannelData(0);
  const view = new DataView(new ArrayBuffer(HEADER + 2 * samples.length));
  const word = (at, text) => [...text].forEach((letter, one) => view.setUint8(at + one, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, HEADER - 8 + 2 * samples.length, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  // PCM, one channel, samples and bytes per second, bytes and bits per sample.
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, at) => view.setInt16(HEADER + 2 * at, 32_767 * Math.max(-1, Math.min(1, sample)), true));
  return new Blob([view], { type: "audio/wav" });
}
